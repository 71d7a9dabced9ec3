"""The notifier: sends what is due of topics with a target there, by HTTP, signed.

::

    python -m kombu_toc.notify --broker toc+redis://localhost:6379/0 --secrets secrets.txt

docs/notifier.md explains it. It needs the extra ``[notify]``; importing `kombu_toc` loads nothing
of it, and importing this nothing of aiohttp.
"""

from __future__ import annotations

from .message import SecretsFile as SecretsFile
from .message import new_secret as new_secret
from .notifier import BACKOFF as BACKOFF
from .notifier import CONCURRENCY as CONCURRENCY
from .notifier import TIMEOUT as TIMEOUT
from .notifier import Notifier as Notifier
from .notifier import beside as beside
from .notifier import check_needs as check_needs
from .notifier import notify as notify

__all__ = (
    "BACKOFF",
    "CONCURRENCY",
    "Notifier",
    "SecretsFile",
    "TIMEOUT",
    "beside",
    "check_needs",
    "new_secret",
    "notify",
)
