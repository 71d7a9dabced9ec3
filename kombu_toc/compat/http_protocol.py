"""The protocol of the connections that aiohttp opens.

Touches: of aiohttp ``TCPConnector._factory``, and the methods of ``client_proto.ResponseHandler``
that a subclass extends or calls, and its ``_payload``.

Why: aiohttp gives what arrives to its parser in one piece, and if the parser does not like the end
of that, its beginning is lost too: the status of an answer 204 that has a body, for example. Who
sends webhooks goes by the status.

Read in aiohttp 3.14.5.

Without: an answer whose body is not as its headers say may count as a failure, whatever its status.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .registry import CompatPart

_METHODS = ("data_received", "set_response_params", "set_exception", "force_close")

PROTOCOL = CompatPart(
    "http-protocol",
    touches="aiohttp's TCPConnector._factory and client_proto.ResponseHandler",
    lost="an answer to a notification whose body is not as its headers say may count as a failure",
    check=lambda connector, handler: [
        *CompatPart.missing(connector, "_factory"),
        *CompatPart.missing(handler, *_METHODS),
    ],
)


def use_protocol(connector: Any, handler: type, make: Callable[[], Any]) -> None:
    """Have the connections of a connector use a protocol.

    handler: its class
    make: makes it
    """
    if PROTOCOL.usable(connector, handler):
        connector._factory = make


def body_of(handler: Any) -> Any:
    """The aiohttp.StreamReader of the answer that a protocol is reading, or None."""
    return getattr(handler, "_payload", None)
