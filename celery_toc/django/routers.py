"""Where the task library is, if that is not Django's default database."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from .apps import TaskLibrary


class LibraryRouter:
    """Reads the models of the task library over the connection that ``TOC_LIBRARY_DATABASE`` names,
    and leaves everything else to other routers::

        DATABASES = {"default": ..., "library": ...}
        DATABASE_ROUTERS = ["celery_toc.django.routers.LibraryRouter"]
        TOC_LIBRARY_DATABASE = "library"
    """

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        if model._meta.app_label != TaskLibrary.label:
            return None
        return getattr(settings, "TOC_LIBRARY_DATABASE", None)

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """The tables are Alembic's."""
        return False if app_label == TaskLibrary.label else None
