"""The app, as Django knows it, and what ``manage.py check`` says of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery import current_app
from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.db import Error, connections, router


class TaskLibrary(AppConfig):
    """Models of the tables that ``celery toc library create`` makes; no migration touches them."""

    name = "celery_toc.django"
    label = "celery_toc"
    verbose_name = "Task library"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register(check_settings)
        checks.register(check_tables, checks.Tags.database)


def check_settings(**_: Any) -> list[Any]:
    """Whether there is a task library, and whether Django would look for it where it is."""
    from .models import PendingTask

    alias = getattr(settings, "TOC_LIBRARY_DATABASE", None)
    if alias is None:
        return [] if _is_configured() else [_NO_LIBRARY]
    if alias not in settings.DATABASES:
        return [
            checks.Error(
                f"TOC_LIBRARY_DATABASE names {alias!r}, which is not among DATABASES",
                hint="Add that database, or correct the name.",
                id="celery_toc.E001",
            )
        ]
    if router.db_for_read(PendingTask) != alias:
        return [
            checks.Error(
                f"TOC_LIBRARY_DATABASE names {alias!r}, and no router leads there",
                hint="DATABASE_ROUTERS = ['celery_toc.django.routers.LibraryRouter']",
                id="celery_toc.E002",
            )
        ]
    return []


#: Only said, for ``celery_toc.django`` also has the permissions of the page.
_NO_LIBRARY = checks.Info(
    "the current app of Celery has no task library, and so the admin has no pages of tasks",
    hint="Set toc_library in the broker's URL, and make its tables: celery toc library create. "
    "SILENCED_SYSTEM_CHECKS silences this.",
    id="celery_toc.I001",
)


def _is_configured() -> bool:
    conf = current_app.conf
    url = str(conf.broker_write_url or conf.broker_url or "")
    return "toc_library" in (conf.broker_transport_options or {}) or "toc_library" in parse_qs(
        urlsplit(url).query
    )


def check_tables(*, databases: Iterable[str] | None = None, **_: Any) -> list[Any]:
    """Whether the tables of the task library are there; ``manage.py check --database NAME``."""
    from .models import MODELS

    missing = [
        one._meta.db_table
        for one in MODELS
        if router.db_for_read(one) in (databases or ()) and not has_table(one)
    ]
    if not missing:
        return []
    return [
        checks.Warning(
            f"the task library has no table {', '.join(missing)}, and so the admin no page of it",
            hint="celery toc library create makes the tables; TOC_LIBRARY_DATABASE says in which "
            "database they are.",
            id="celery_toc.W001",
        )
    ]


def has_table(model: Any) -> bool:
    """Whether the table of a model is there. One that was there stays."""
    name = model._meta.db_table
    if name not in _there:
        try:
            connection = connections[router.db_for_read(model)]
            with connection.cursor() as cursor:
                _there.update(connection.introspection.table_names(cursor))
        except Error:
            return False  # that its database cannot be used, whatever uses it says
    return name in _there


_there: set[str] = set()
