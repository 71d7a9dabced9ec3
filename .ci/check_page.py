"""For check_package.py: whether the page is shown within Django, with the extra ``http`` alone."""

from importlib.util import find_spec

import django
from celery import Celery
from django.conf import settings
from django.test import RequestFactory

from kombu_toc.http.page.presentation import templates

for module in ("sqlalchemy", "prometheus_client", "aiohttp", "rich"):
    assert find_spec(module) is None, f"{module} is there, which the page must not need"
for name in templates().list_templates():
    assert templates().get_template(name)

# The broker cannot be reached: what says so is a page, too.
Celery("shop", broker="toc+redis://localhost:1/0").set_default()
settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth"])
django.setup()

from django.contrib.auth.models import User  # noqa: E402

from celery_toc.web.django import urlpatterns  # noqa: E402

request = RequestFactory().get("/")
request.user = User(username="anna", is_staff=True, is_superuser=True)
answer = urlpatterns[0].callback(request, name="")
assert answer.status_code == 503, answer
assert b"<h1>The broker cannot be used just now</h1>" in answer.content, answer.content
print(f"{len(templates().list_templates())} templates load, and Django shows the page")
