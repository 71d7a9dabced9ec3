"""The timeout center over HTTP, for any language: an ASGI application without Celery.

::

    python -m kombu_toc.http --broker toc+redis://localhost:6379/0

docs/http.md explains it. It needs the extra ``[http]``; importing `kombu_toc` loads nothing of it.
"""

from __future__ import annotations

from .app import HttpApi, api_for
from .fields import (
    ANYTHING,
    FLAG,
    SPARSE,
    TEXT,
    Anything,
    Flag,
    Headers,
    Listed,
    Number,
    Object,
    Problem,
    Text,
    Time,
    array,
    invalid,
    members,
    not_found,
    or_null,
    page_of,
    paging,
    record,
    retry_after,
)
from .messages import id_of, trace_of
from .page import Mask, Page, PageExtras, Parts, Visitor, WorkerRow
from .queues import page_of_names
from .request import Answer, Operations, Request, answer
from .serving import PORT, check_needs, serve, serve_as_told, server_options
from .tokens import Masking, Token, Tokens, matches, new_token, read_tokens, tokens_of

__all__ = (
    "ANYTHING",
    "FLAG",
    "TEXT",
    "Answer",
    "Anything",
    "Flag",
    "Headers",
    "HttpApi",
    "Listed",
    "Mask",
    "Masking",
    "Number",
    "Object",
    "Operations",
    "PORT",
    "SPARSE",
    "Page",
    "PageExtras",
    "Parts",
    "Problem",
    "Request",
    "Text",
    "Time",
    "Token",
    "Tokens",
    "Visitor",
    "WorkerRow",
    "answer",
    "array",
    "api_for",
    "id_of",
    "invalid",
    "matches",
    "members",
    "new_token",
    "not_found",
    "or_null",
    "page_of",
    "paging",
    "page_of_names",
    "read_tokens",
    "record",
    "retry_after",
    "check_needs",
    "serve",
    "serve_as_told",
    "server_options",
    "tokens_of",
    "trace_of",
)
