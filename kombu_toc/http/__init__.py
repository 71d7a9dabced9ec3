"""The timeout center over HTTP, for any language: an ASGI application without Celery.

::

    python -m kombu_toc.http --broker toc+redis://localhost:6379/0

docs/http.md explains it. It needs the extra ``[http]``; importing `kombu_toc` loads nothing of it.
"""

from __future__ import annotations

from . import fields
from .app import HttpApi, api_for
from .fields import Problem
from .messages import id_of, trace_of
from .page.presentation import PageExtras, Parts, WorkerRow
from .queues import page_of_names
from .request import Answer, Background, Operations, Request, answer
from .serving import serve, serve_as_told, server_options
from .tokens import Mask, Masking, Token, Tokens, Visitor, matches, new_token, read_tokens

__all__ = (
    "Answer",
    "Background",
    "HttpApi",
    "Mask",
    "Masking",
    "Operations",
    "PageExtras",
    "Parts",
    "Problem",
    "Request",
    "Token",
    "Tokens",
    "Visitor",
    "WorkerRow",
    "answer",
    "api_for",
    "id_of",
    "matches",
    "new_token",
    "page_of_names",
    "read_tokens",
    "fields",
    "serve",
    "serve_as_told",
    "server_options",
    "trace_of",
)
