"""The HTTP API of an app's broker, with what knows Celery: tasks, results, schedules, metrics.

``celery -A shop toc web`` serves it; docs/http.md explains it. It needs the extra ``[http]``.
"""

from __future__ import annotations

from .page import api_for_app

__all__ = ("api_for_app",)
