"""The other broker: one of Kombu's own Redis transport, and who is connected to a server."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from redis.exceptions import NoPermissionError

from ..client.connect import connect
from ..client.options import read
from ..client.urls import mask_password, read_url
from ..errors import ConfigurationError, ConsumersError
from ..model.limits import PRIORITY_STEPS

#: What a broker's ``broker_transport_options`` may say of where its messages are.
_OPTIONS = {
    "global_keyprefix": "",
    "sep": "\x06\x16",
    "unacked_key": "unacked",
    "unacked_index_key": "unacked_index",
}

#: What URLs of Kombu's own Redis transport begin with, and a socket as read here.
SCHEMES = ("redis", "rediss", "redis+socket", "unix", "sentinel")


class Broker:
    """A broker of Kombu's own Redis transport.

    url: its URL
    options: its ``broker_transport_options``

    Raises ConfigurationError for a URL that cannot be used.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        if url.startswith("toc"):
            raise ConfigurationError(
                f"{mask_password(url)} is a timeout center already; name the other broker, "
                "redis://..."
            )
        if url.partition("://")[0] not in SCHEMES:
            raise ConfigurationError(
                f"{mask_password(url)} is not a broker of Kombu's Redis transport; its URL begins "
                f"with {', '.join(f'{one}://' for one in SCHEMES[:-1])} or {SCHEMES[-1]}://"
            )
        address = read_url(re.sub(r"^redis\+socket:", "unix:", url))
        options = dict(options)
        ssl = options.pop("ssl", None)
        where = {k: options.pop(k, default) for k, default in _OPTIONS.items()}
        where.update({k: address.query.pop(k) for k in _OPTIONS if k in address.query})
        settings = read(address.query, options)
        self.client = connect(address, settings, ssl=ssl)
        self.db = address.db
        self.shown = mask_password(url)
        self.prefix: str = where["global_keyprefix"]
        self.sep: str = where["sep"]
        self.unacked_key: str = where["unacked_key"]
        self.unacked = self.prefix + self.unacked_key
        self.index = self.prefix + where["unacked_index_key"]
        self.steps = settings.priority_steps or PRIORITY_STEPS

    def close(self) -> None:
        self.client.close()
        self.client.connection_pool.disconnect()


def connected(client: Any, shown: str) -> list[dict[str, Any]]:
    """Who is connected to a server. Raises ConsumersError if it does not say."""
    try:
        found: list[dict[str, Any]] = client.client_list()
        return found
    except NoPermissionError as exc:
        raise ConsumersError(
            f"{shown} does not say who is connected ({exc}); make sure that its workers are "
            "stopped, and say so (force)"
        ) from exc


def refuse_if_any(
    consumers: Collection[str], shown: str, kind: str = "connection", hint: str = ""
) -> None:
    """Raises ConsumersError if there are consumers; `kind` is what they are."""
    if consumers:
        first = sorted(consumers)[:5]
        named = ", ".join(first) + (", ..." if len(consumers) > len(first) else "")
        consume = f"{kind} consumes" if len(consumers) == 1 else f"{kind}s consume"
        raise ConsumersError(
            f"{len(consumers)} {consume} from {shown} ({named}): stop its workers and whatever "
            f"watches them, or what they have taken runs twice{hint}"
        )


def literally(text: str) -> str:
    """A text as a pattern of Redis's that only it matches."""
    return re.sub(r"([][*?\\^])", r"\\\1", text)
