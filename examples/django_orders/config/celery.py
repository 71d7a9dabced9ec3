"""The Celery app, as Celery's manual sets it up for Django."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

app = Celery("django_orders")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
