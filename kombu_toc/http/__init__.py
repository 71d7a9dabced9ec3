"""The timeout center over HTTP, for any language: an ASGI application without Celery.

::

    python -m kombu_toc.http --broker toc+redis://localhost:6379/0

docs/http.md explains it. It needs the extra ``[http]``; importing `kombu_toc` loads nothing of it.
"""

from __future__ import annotations

import sys

from .app import HttpApi as HttpApi
from .app import api_for as api_for
from .fields import ANYTHING as ANYTHING
from .fields import FLAG as FLAG
from .fields import SPARSE as SPARSE
from .fields import TEXT as TEXT
from .fields import Anything as Anything
from .fields import Flag as Flag
from .fields import Headers as Headers
from .fields import Listed as Listed
from .fields import Number as Number
from .fields import Object as Object
from .fields import Problem as Problem
from .fields import Text as Text
from .fields import Time as Time
from .fields import array as array
from .fields import invalid as invalid
from .fields import members as members
from .fields import not_found as not_found
from .fields import or_null as or_null
from .fields import page_of as page_of
from .fields import paging as paging
from .fields import record as record
from .fields import retry_after as retry_after
from .messages import id_of as id_of
from .messages import trace_of as trace_of
from .page import Mask as Mask
from .page import Page as Page
from .page import PageExtras as PageExtras
from .page import Parts as Parts
from .page import Visitor as Visitor
from .page import WorkerRow as WorkerRow
from .queues import page_of_names as page_of_names
from .request import Answer as Answer
from .request import Operations as Operations
from .request import Request as Request
from .request import answer as answer
from .serving import PORT as PORT
from .serving import check_needs as check_needs
from .serving import serve as serve
from .serving import serve_as_told as serve_as_told
from .serving import server_options as server_options
from .tokens import Masking as Masking
from .tokens import Token as Token
from .tokens import Tokens as Tokens
from .tokens import matches as matches
from .tokens import new_token as new_token
from .tokens import read_tokens as read_tokens
from .tokens import tokens_of as tokens_of

#: What is imported above from the modules of this package: each name stands there once.
__all__ = [
    name
    for name, value in list(vars().items())
    if not (name.startswith("_") or name == "annotations" or isinstance(value, type(sys)))
]
