"""What is sent of a message: its bytes, and the headers of Standard Webhooks."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from ..errors import ConfigurationError, EnvelopeError
from ..model.delivery import origin_in
from ..model.limits import Url
from ..model.message import first_line, unpack
from ..model.results import Delivery

# -- signatures as Standard Webhooks has them, and the secrets of targets

#: The environment variable with the lines of a file of secrets.
SECRETS = "TOC_NOTIFY_SECRETS"

#: What a secret begins with, and how many bytes it has behind that.
PREFIX = "whsec_"
LEAST, MOST = 24, 64

#: Secrets that a target has at most.
MOST_SECRETS = 8

#: Targets whose secrets are remembered.
MAX_KNOWN = 4096


def new_secret() -> str:
    """A secret that nobody has."""
    return PREFIX + b64encode(secrets.token_bytes(32)).decode()


def signature(keys: Sequence[bytes], id: str, timestamp: int, body: bytes) -> str:
    """The header ``webhook-signature``: a signature by each key, the first key's first."""
    signed = f"{id}.{timestamp}.".encode() + body
    made = (hmac.digest(key, signed, hashlib.sha256) for key in keys)
    return " ".join("v1," + b64encode(one).decode() for one in made)


class Secrets:
    """The secrets of targets.

    lines: a target and its secrets in each, separated by blanks; what follows a # is a remark
    source: where the lines are, for errors

    Raises ConfigurationError, which names the line and tells no secret.
    """

    def __init__(self, lines: Iterable[str], source: str = "the secrets") -> None:
        #: of each line, what the targets are like that it is for, and the keys of their secrets
        self._lines: list[tuple[re.Pattern[str], tuple[bytes, ...]]] = []
        #: the keys that sign what is sent to a URL: those of the first line that fits; None if none
        #: does
        self.of = lru_cache(maxsize=MAX_KNOWN)(self._keys_of)
        for number, line in enumerate(lines, 1):
            target, *said = line.partition("#")[0].split() or [""]
            if not target:
                continue
            where = f"{source}, line {number}"
            if not said:
                raise ConfigurationError(
                    f"{where}: a line is a target and its secrets, such as those that --new-secret "
                    "prints"
                )
            if len(said) > MOST_SECRETS:
                raise ConfigurationError(
                    f"{where}: a target has {MOST_SECRETS} secrets at most, not {len(said)}: each "
                    "signs every request"
                )
            keys = tuple(_key_of(one, where) for one in said)
            self._lines.append((_pattern(target, where), keys))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __repr__(self) -> str:
        return f"<Secrets of {len(self._lines)} targets>"

    def _keys_of(self, target: str) -> tuple[bytes, ...] | None:
        place = _place(target)
        return next((keys for fits, keys in self._lines if fits.fullmatch(place)), None)


def _key_of(secret: str, where: str) -> bytes:
    try:
        key = b64decode(secret.removeprefix(PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(PREFIX) or not LEAST <= len(key) <= MOST:
        raise ConfigurationError(
            f"{where}: a secret is {PREFIX} and {LEAST} to {MOST} bytes in base64, such as "
            "--new-secret prints"
        )
    return key


#: The ports that need not be said.
_PORTS = {"https": 443, "http": 80}

_ENCODED = re.compile("%([0-9A-Fa-f]{2})")


def normal(target: str) -> str:
    """A URL in the form in which it is compared and sent, of all that mean the same (RFC 3986): no
    port that need not be said, no segments of dots in its path, nothing encoded that need not be.
    """
    found = urlsplit(target)
    host = (found.hostname or "").lower()
    host = f"[{host}]" if ":" in host else host
    if found.port and found.port != _PORTS.get(found.scheme):
        host += f":{found.port}"
    query = f"?{_decoded(found.query)}" if found.query else ""
    return f"{found.scheme}://{host}{_path(found.path)}{query}"


def _path(path: str) -> str:
    """A path without segments of dots, also encoded ones: a server would leave these out itself."""
    kept: list[str] = []
    segments = _decoded(path).split("/")[1:] or [""]
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", ".."):
        kept.append("")
    return "/" + "/".join(kept)


def _decoded(text: str) -> str:
    """Text of a URL in which only that is encoded which has to be."""

    def one(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16))
        plain = character.isascii() and (character.isalnum() or character in "-._~")
        return character if plain else match[0].upper()

    return _ENCODED.sub(one, text)


def _place(target: str) -> str:
    """A URL as it is compared with lines: it always has a port, and no brackets."""
    found = urlsplit(normal(target))
    port = found.port or _PORTS.get(found.scheme, 0)
    query = f"?{found.query}" if found.query else ""
    return f"{found.scheme}://{found.hostname}:{port}{found.path}{query}"


def _pattern(target: str, where: str) -> re.Pattern[str]:
    """What fits the places of targets: in the host, ``*`` is any text without a slash or colon."""
    if target == "*":
        return re.compile(".*", re.DOTALL)
    found = re.fullmatch(
        r"(https?)://(\[[0-9a-fA-F:]+\]|[^/:?@\[\]]+)(?::(\d{1,5}))?([/?].*)?", target, re.ASCII
    )
    if found is None:
        raise ConfigurationError(
            f"{where}: a target is a URL, a part of one such as https://shop.example.com, or "
            "* for all"
        )
    scheme, host, port, path = found.groups()
    if path is not None and path.startswith("?"):
        path = f"/{path}"
    if path is not None:
        path, mark, query = path.partition("?")
        path = f"{_path(path)}{mark}{_decoded(query)}"
    port = port or str(_PORTS[scheme])
    shown = "[^/:]*".join(map(re.escape, host.strip("[]").lower().split("*")))
    rest = ".*" if path is None else ".*".join(map(re.escape, path.split("*")))
    return re.compile(f"{scheme}://{shown}:{port}{rest}", re.DOTALL)


class SecretsFile:
    """Secrets that are read again when they have changed.

    path: a file; None for the environment variable :data:`SECRETS`

    Raises ConfigurationError as :class:`Secrets`, OSError if the file cannot be read.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = None if path is None else Path(path)
        self._read: tuple[int, ...] = ()
        self.secrets = Secrets(())
        try:
            self.refresh()
        except OSError as exc:
            raise OSError(f"the secrets cannot be read: {exc}") from exc

    def refresh(self) -> bool:
        """Read them if they have changed; whether they have. If that raises, those that were read
        before stay, and are not read again until they change."""
        if self._path is None:
            if self._read:
                return False
            self._read = (1,)
            self.secrets = Secrets(os.environ.get(SECRETS, "").splitlines(), SECRETS)
            return True
        found = self._path.stat()
        read = (found.st_mtime_ns, found.st_size, found.st_ino)
        if read == self._read:
            return False
        self._read = read
        self.secrets = Secrets(self._path.read_text().splitlines(), str(self._path))
        return True


# -- what is sent of a message

#: The header that gives one message another target than its queue's.
TARGET = "x-target"

#: Bytes that a compressed message may expand to.
MAX_EXPANDED = 16 << 20

#: Bytes that are parsed to tell whether they are JSON: nothing else is done meanwhile.
MAX_PARSED = 1 << 20

#: Characters of an id that are sent; of a longer one a hash is.
MAX_ID = 200

#: What a message of Kombu's or of the HTTP API begins with, if it is one; and if it is compressed.
COMPRESSED = (b"\x01", b"\x02")
_ENVELOPES = (b'{"h":', *COMPRESSED)

#: The same as it is written among the headers, and bytes of these that are looked through for it.
_NAMED = b'"x-target"'
_HEADERS = 64 << 10

#: The headers of a message that are sent along: the context of a trace.
_TRACE = ("traceparent", "tracestate")

#: What a header may have.
_PLAIN = re.compile(r"[\x20-\x7e]{1,1000}")

_url = Url()


class Content(NamedTuple):
    """A message as it is sent."""

    body: bytes
    content_type: str
    headers: dict[str, str]  #: those that go along
    target: str | None  #: the URL that the message itself names


def content_of(delivery: Delivery) -> Content:
    """What is sent of a message. Raises ConfigurationError if it names a target that is none,
    EnvelopeError if it is too large."""
    raw = delivery.body
    if raw.startswith(_ENVELOPES):
        try:
            return _unpacked(unpack(raw, delivery.id, MAX_EXPANDED))
        except EnvelopeError as exc:
            if "expands to more" in str(exc):
                raise
            # Otherwise it only looks like one.
    return Content(raw, type_of(raw), {}, None)


def host_of(delivery: Delivery) -> str:
    """The host, and the port, of the target that a message names; empty if it names none."""
    raw = delivery.body
    if not raw.startswith(_ENVELOPES):
        return ""
    try:
        if _NAMED not in first_line(raw, delivery.id, _HEADERS):
            return ""
        target = unpack(raw, delivery.id, MAX_EXPANDED)["headers"].get(TARGET)
        return urlsplit(normal(target)).netloc if isinstance(target, str) else ""
    except (EnvelopeError, ValueError):
        return ""  # that it cannot be sent is said when it is


def _unpacked(message: dict[str, Any]) -> Content:
    said = message["headers"]
    kind = message["content-type"]
    if not isinstance(kind, str) or not _PLAIN.fullmatch(kind):
        kind = "application/octet-stream"
    encoding = message["content-encoding"]
    if kind.startswith("text/") and "charset" not in kind and encoding == "utf-8":
        kind += "; charset=utf-8"
    along = {
        name: said[name]
        for name in _TRACE
        if isinstance(said.get(name), str) and _PLAIN.fullmatch(said[name])
    }
    target = said.get(TARGET)
    if target is not None:
        try:
            target = _url.check(f"the header {TARGET}", target)
        except ConfigurationError as exc:
            # It may have what is secret, and is told wherever messages fail.
            raise ConfigurationError(str(exc).partition(", not ")[0]) from None
    return Content(message["body"], kind, along, target)


def type_of(body: bytes) -> str:
    """The content type of bytes of which nobody has said one."""
    if body[:1] in (b"{", b"["):
        if len(body) > MAX_PARSED:
            return "application/json" if body[-1:] in (b"}", b"]") else "application/octet-stream"
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            pass
        else:
            is_event = isinstance(found, dict) and "specversion" in found
            return "application/cloudevents+json" if is_event else "application/json"
    try:
        body.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain; charset=utf-8"


def webhook_id(delivery: Delivery) -> str:
    """The header ``webhook-id``: the same for each attempt, and another one for each other message
    of the same id. It has no dot, which separates the parts of what is signed."""
    slot, birth = origin_in(delivery.birth, delivery.slot)
    told = _digest(f"{delivery.topic}\n{slot}\n{birth}")[:16]
    return f"{_encoded(delivery.id)}_{told}"


def headers_of(
    delivery: Delivery, content: Content, keys: Sequence[bytes], timestamp: int
) -> dict[str, str]:
    """The headers of one attempt.

    keys: those that sign it; without any, it is not signed
    timestamp: when it is made, in seconds since the epoch
    """
    id = webhook_id(delivery)
    made = {
        "content-type": content.content_type,
        "webhook-id": id,
        "webhook-timestamp": str(timestamp),
        "toc-queue": _encoded(delivery.topic),
        "toc-id": _encoded(delivery.id),
        "toc-failures": str(delivery.failures),
        **content.headers,
    }
    if keys:
        made["webhook-signature"] = signature(keys, id, timestamp, content.body)
    return made


def _encoded(name: str) -> str:
    made = quote(name, safe=":@+,", errors="surrogatepass").replace(".", "%2E")
    return made if len(made) <= MAX_ID else f"h-{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
