# Django needs the app for shared_task, in every process.
from .celery import app as celery_app

__all__ = ("celery_app",)
