"""Programs of Django's: what their settings share, and how they are asked."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from . import nursery

#: Settings of a project with an admin: texts, for programs are run without these packages.
ADMIN = """
contrib = [f"django.contrib.{name}" for name in ("admin", "auth", "sessions", "messages")]
ADMIN = dict(
    SECRET_KEY="of a test",
    ALLOWED_HOSTS=["testserver"],
    ROOT_URLCONF="project",
    STATIC_URL="static/",
    USE_TZ=True,
    INSTALLED_APPS=["django.contrib.contenttypes", *contrib, "celery_toc.django"],
    MIDDLEWARE=[
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
    ],
    TEMPLATES=[
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
    ],
)
"""

#: A database of Django's, by a URL of SQLAlchemy's.
DATABASE = """
def database(url):
    from sqlalchemy.engine import make_url

    url = make_url(url.replace("mariadb:", "mysql:"))
    kind = {"sqlite": "sqlite3"}.get(url.get_backend_name(), url.get_backend_name())
    if kind == "mysql":
        import pymysql
        pymysql.version_info = (2, 2, 1, "final", 0)
        pymysql.install_as_MySQLdb()
    return {
        "ENGINE": f"django.db.backends.{kind}",
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or "",
        "PORT": url.port or "",
    }
"""

#: Reads expressions, and answers in JSON.
ANSWERS = """
for line in sys.stdin:
    try:
        print(json.dumps(eval(line), default=str), flush=True)
    except Exception as exc:
        print(json.dumps({"error": f"{type(exc).__name__}: {exc}"}), flush=True)
"""


class Asked:
    """A program that ends with :data:`ANSWERS`; url: of its library, if it has one."""

    url = ""

    def __init__(self, *arguments: str, **how: Any) -> None:
        self._process = nursery.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **how,
        )

    def __call__(self, expression: str) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(expression + "\n")
        stdin.flush()
        found = json.loads(stdout.readline())
        assert not (isinstance(found, dict) and "error" in found), found
        return found

    def end(self) -> None:
        self._process.communicate(timeout=30)
        assert self._process.returncode == 0
