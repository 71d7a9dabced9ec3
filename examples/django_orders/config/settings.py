"""Settings. The environment may name another database, and how long a customer has to pay."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

DATA = Path(__file__).parents[1] / "data"
DATA.mkdir(exist_ok=True)

SECRET_KEY = os.environ.get("SECRET_KEY", "for trying it out only")
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "celery_toc.django",  # pending and ended tasks in the admin
    "orders",
]
# Customers do not log in, so orders need no guard against forms of others' (CSRF); the admin has
# its own.
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "config.urls"
STATIC_URL = "static/"
TIME_ZONE = "UTC"
USE_TZ = True

#: The orders' database, a file of SQLite's or one of PostgreSQL's. The task library is in it, too:
#: an order and its timeout are written in one transaction.
DATABASE = os.environ.get("DATABASE", f"sqlite:///{DATA / 'orders.sqlite3'}")

_url = urlsplit(DATABASE)
if _url.scheme == "sqlite":
    _database = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": _url.path[1:],
        # Seconds to wait while another process writes: the server and the workers do.
        "OPTIONS": {"timeout": 20},
        # A file and not in memory, so that a worker can use it as well.
        "TEST": {"NAME": DATA / "test.sqlite3"},
    }
else:
    _database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _url.path[1:],
        "USER": _url.username,
        "PASSWORD": unquote(_url.password or ""),
        "HOST": _url.hostname,
        "PORT": _url.port or "",
    }
DATABASES = {"default": _database}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# A server out of a wheel, its data in that folder. Celery looks into the environment first:
# CELERY_BROKER_URL=toc+redis://localhost:6379/0
CELERY_BROKER_URL = f"toc+embedded://{DATA / 'redis'}"
CELERY_BROKER_TRANSPORT_OPTIONS = {"toc_library": DATABASE}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# What became of an order stands in the database.
CELERY_TASK_IGNORE_RESULT = True

#: Seconds that a customer has to pay.
ORDER_TIMEOUT = float(os.environ.get("ORDER_TIMEOUT", 15 * 60))
