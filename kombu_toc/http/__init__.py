"""The timeout center over HTTP, for any language: an ASGI application without Celery.

::

    python -m kombu_toc.http --broker toc+redis://localhost:6379/0

docs/http.md explains it. It needs the extra ``[http]``; importing `kombu_toc` loads nothing of it.
"""

from __future__ import annotations

from .app import HttpApi as HttpApi
from .app import api_for as api_for
from .fields import ANYTHING as ANYTHING
from .fields import FLAG as FLAG
from .fields import TEXT as TEXT
from .fields import Anything as Anything
from .fields import Flag as Flag
from .fields import Headers as Headers
from .fields import Listed as Listed
from .fields import Number as Number
from .fields import Object as Object
from .fields import Text as Text
from .fields import Time as Time
from .fields import array as array
from .fields import or_null as or_null
from .fields import record as record
from .messages import id_of as id_of
from .messages import trace_of as trace_of
from .page import FiringRow as FiringRow
from .page import Mask as Mask
from .page import Page as Page
from .page import PageExtras as PageExtras
from .page import Parts as Parts
from .page import ScheduleRow as ScheduleRow
from .page import Visitor as Visitor
from .page import WorkerRow as WorkerRow
from .problems import Problem as Problem
from .problems import invalid as invalid
from .problems import not_found as not_found
from .problems import retry_after as retry_after
from .queues import page_of_names as page_of_names
from .request import Answer as Answer
from .request import Operations as Operations
from .request import Request as Request
from .request import answer as answer
from .serving import PORT as PORT
from .serving import check_needs as check_needs
from .serving import serve as serve
from .tokens import Token as Token
from .tokens import Tokens as Tokens
from .tokens import matches as matches
from .tokens import new_token as new_token
from .tokens import read_tokens as read_tokens
from .tokens import tokens_of as tokens_of

__all__ = (
    "ANYTHING",
    "FLAG",
    "TEXT",
    "Answer",
    "Anything",
    "FiringRow",
    "Flag",
    "Headers",
    "HttpApi",
    "Listed",
    "Mask",
    "Number",
    "Object",
    "Operations",
    "PORT",
    "Page",
    "PageExtras",
    "Parts",
    "Problem",
    "Request",
    "ScheduleRow",
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
    "new_token",
    "not_found",
    "or_null",
    "page_of_names",
    "read_tokens",
    "record",
    "retry_after",
    "check_needs",
    "serve",
    "tokens_of",
    "trace_of",
)
