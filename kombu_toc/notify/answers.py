"""Reads the answers of targets: the headers of one count whatever its body is like."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from ..compat.http_protocol import body_of, use_protocol

#: Bytes of headers in which their end is looked for. What has more is left to the parser.
MAX_HEAD = 64 << 10

#: The end of headers.
_END = re.compile(rb"\r?\n\r?\n")

#: What says of an answer that has no body that it has one: the status, and the two headers.
_BODILESS = re.compile(rb"HTTP/\d\.\d (?:204|304)\b")
_BODY = re.compile(rb"\n(?:content-length[ \t]*:[ \t]*0*[1-9]|transfer-encoding[ \t]*:)", re.I)


class AnswerHandler(ResponseHandler):
    """As aiohttp has it, but the parser gets the headers of an answer before what is behind them.
    So a body that is not as these say does not take the status along: one of a 204, which has
    none, or one that is longer than was said, or is badly divided."""

    #: the beginning of an answer whose headers have not ended; None: there is none
    _head: bytes | None = None

    def set_response_params(self, *args: Any, **kwargs: Any) -> None:
        self._head = b""
        super().set_response_params(*args, **kwargs)

    def data_received(self, data: bytes) -> None:
        while self._head is not None and data:
            had = len(self._head)
            head = self._head + data
            end = _END.search(head, max(had - 3, 0))
            if end is None:
                self._head = head if len(head) < MAX_HEAD else None
                break
            self._head = b"" if head.startswith(b"HTTP/1.1 1") else None  # another answer follows
            if _BODILESS.match(head) and _BODY.search(head, 0, end.end()):
                self.force_close()  # nobody may take its body for the next answer
            first, data = data[: end.end() - had], data[end.end() - had :]
            super().data_received(first)
            if not data:
                return
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        super().set_exception(exc, *cause)
        body = body_of(self)
        if body is not None and body.exception() is None and not body.is_eof():
            # Or it would be waited for until its time is over.
            body.set_exception(aiohttp.ClientPayloadError(str(exc)))


def read_heads_first(connector: aiohttp.TCPConnector) -> None:
    """Have a connector's connections read answers so."""
    make = partial(AnswerHandler, loop=asyncio.get_running_loop())
    use_protocol(connector, AnswerHandler, make)
