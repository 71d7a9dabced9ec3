"""The app, as Django knows it."""

from __future__ import annotations

from django.apps import AppConfig


class TaskLibrary(AppConfig):
    """Models of the tables that ``celery toc library create`` makes; no migration touches them."""

    name = "celery_toc.django"
    label = "celery_toc"
    verbose_name = "Task library"
    default_auto_field = "django.db.models.BigAutoField"
