"""The notifier: sends what is due of topics with a target there, by HTTP, signed.

::

    python -m kombu_toc.notify --broker toc+redis://localhost:6379/0 --secrets secrets.txt

docs/notifier.md explains it. It needs the extra ``[notify]``; importing `kombu_toc` loads nothing
of it, and importing this nothing of aiohttp.
"""

from __future__ import annotations

from .message import SecretsFile, new_secret
from .notifier import Notifier, beside, check_needs, notifier_options, notify

__all__ = (
    "Notifier",
    "SecretsFile",
    "beside",
    "check_needs",
    "new_secret",
    "notifier_options",
    "notify",
)
