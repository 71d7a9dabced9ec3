"""Settings. The environment may name another database, and how long a customer has to pay."""

import os
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
DATA.mkdir(exist_ok=True)

SECRET_KEY = os.environ.get("SECRET_KEY", "for trying it out only")
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
INSTALLED_APPS = ["orders"]
# Nobody logs in, so there are no sessions, and no forms of others' to guard against (CSRF).
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]
ROOT_URLCONF = "config.urls"
STATIC_URL = "static/"
TIME_ZONE = "UTC"
USE_TZ = True

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE", DATA / "orders.sqlite3"),
        # Seconds to wait while another process writes: the server and the workers do.
        "OPTIONS": {"timeout": 20},
        # A file and not in memory, so that a worker can use it as well.
        "TEST": {"NAME": DATA / "test.sqlite3"},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# A server out of a wheel, its data in that folder. Celery looks into the environment first:
# CELERY_BROKER_URL=toc+redis://localhost:6379/0
CELERY_BROKER_URL = f"toc+embedded://{DATA / 'redis'}"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# What became of an order stands in the database.
CELERY_TASK_IGNORE_RESULT = True

#: Seconds that a customer has to pay.
ORDER_TIMEOUT = float(os.environ.get("ORDER_TIMEOUT", 15 * 60))
