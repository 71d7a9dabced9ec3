"""The page within Django: behind the admin's log-in, its permissions and its guard of forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kombu_toc import TimeoutCenter

from ..meta.test_readme import named
from ..support.django_project import ADMIN, ANSWERS, Asked
from ..support.servers import Server

pytestmark = pytest.mark.one_server("what it tests is Django's")

#: A project with the page.
PROJECT = """
import json, sys

broker, own, urls = sys.argv[1:]

import django
from celery import Celery
from django.conf import settings

settings.configure(
    **ADMIN,
    PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],  # the others take long
    CELERY_TOC_WEB_MASK=["card"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": own}},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
app = Celery("project", broker=broker)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.set_default()
def pay(order, card): pass
app.task(name="shop.pay", shared=False)(pay)
django.setup()

from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import AsyncClient, Client

sys.modules["project"] = sys.modules["__main__"]
exec(urls)  # as the documentation has it
call_command("migrate", verbosity=0)


def person(name, staff=True, **more):
    made = User.objects.create_user(name, password="secret", is_staff=staff, **more)
    return made


def allow(name, *codes):
    of_app = Permission.objects.filter(content_type__app_label="celery_toc")
    permissions = of_app.filter(codename__in=codes)
    User.objects.get(username=name).user_permissions.set(permissions)
    return permissions.count()


def client(name=None):
    made = Client(enforce_csrf_checks=True)
    if name is not None:
        made.login(username=name, password="secret")
    return made


clients = {}


def of(name):
    return clients.setdefault(name, client(name))


def get(name, view, /, **query):
    made = of(name).get(f"/admin/toc/{view}", query)
    return [made.status_code, made.content.decode(), dict(made.headers)]


def post(name, view, token=None, /, **fields):
    if token is None:
        text = of(name).get("/admin/toc/queue", {"queue": "mail"}).content.decode()
        _, _, rest = text.partition('name="csrfmiddlewaretoken" value="')
        token = rest.partition('"')[0]
    from urllib.parse import urlencode

    body = urlencode({"csrfmiddlewaretoken": token, **fields}, doseq=True)
    kind = "application/x-www-form-urlencoded"
    made = of(name).post(f"/admin/toc/{view}", body, content_type=kind)
    return [made.status_code, made.content.decode(), dict(made.headers)]


def asynchronous(name, view):
    import asyncio

    async def run():
        made = AsyncClient()
        await made.alogin(username=name, password="secret")
        return (await made.get(f"/admin/toc/{view}")).status_code

    return asyncio.run(run())

"""


@pytest.fixture(scope="module")
def project(single_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "project_page.py").write_text(ADMIN + PROJECT + ANSWERS)
    made = Asked(
        *(str(folder / "project_page.py"), single_server.toc_url, str(folder / "own.sqlite3")),
        named("docs/page.md", 'include("celery_toc.web.django")'),
        cwd=Path(__file__).parents[2],
    )
    yield made
    made.end()


@pytest.fixture
def ask(project: Asked, center: TimeoutCenter) -> Asked:
    """A project with a message, and with persons whom nobody has allowed anything yet."""
    center.put("mail", "order-7", b'{"card": "4111-1111", "order": 7}', delay=3600)
    project("[User.objects.all().delete(), clients.clear()]")
    project("[person('root', is_superuser=True).pk, person('anna').pk, person('ben', False).pk]")
    return project


def test_the_page_is_for_staff_with_a_permission(ask: Asked, center: TimeoutCenter) -> None:
    status, _, headers = ask("get(None, 'queue', queue='mail')")
    assert status == 302 and "/admin/login/?next=" in headers["Location"]
    assert ask("get('anna', '')")[0] == 403
    assert ask("allow('anna', 'read_center')") == 1
    status, text, headers = ask("get('anna', 'queue', queue='mail')")
    assert status == 200 and "order-7" in text and "anna" in text
    assert "4111-1111" not in text  # CELERY_TOC_WEB_MASK
    assert "Cancel" not in text and "Sign in" not in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask("get('anna', 'page.css')")[0] == 200
    assert ask("get('anna', 'nothing')")[0] == 404
    form = "queue='mail', id='order-7', act='cancel', sure='1'"
    assert ask(f"post('anna', 'do', {form})")[0] == 403
    assert ask("allow('ben', 'read_center')") == 1
    assert ask("get('ben', '')")[0] == 403  # who is no staff
    assert ask("allow('anna', 'read_center', 'write_center')") == 2
    assert ask("post('anna', 'pause', queue='mail', act='pause')")[0] == 403
    assert center.get("order-7")
    assert ask(f"post('anna', 'do', 'nonsense', {form})")[0] == 403
    assert ask(f"post('anna', 'do', '', {form})")[0] == 403
    assert center.get("order-7")
    status, _, headers = ask(f"post('anna', 'do', {form})")
    assert (status, headers["Location"]) == (303, "queue?queue=mail")
    assert not center.get("order-7")
    [(_, entry)] = center.client.xrange(center.keys.audit)
    assert json.loads(entry[b"e"]) == ["anna", "cancel", "mail", "order-7", 1]


def test_a_superuser_may_do_everything_and_the_admin_leads_who_may_look_to_the_page(
    ask: Asked, center: TimeoutCenter
) -> None:
    index = ask("of('root').get('/admin/').content.decode()")
    assert '"/admin/celery_toc/center/"' in index and "Queues and messages" in index
    assert "/add/" not in index.partition("Queues and messages")[2][:300]
    there = ask("of('root').get('/admin/celery_toc/center/').headers['Location']")
    assert there == "/admin/toc/"
    assert ask("get('root', '')")[0] == 200
    assert "Queues and messages" not in ask("of('anna').get('/admin/').content.decode()")
    assert ask("of('anna').get('/admin/celery_toc/center/').status_code") == 403
    assert ask("allow('anna', 'read_center')") == 1
    assert "Queues and messages" in ask("of('anna').get('/admin/').content.decode()")
    assert ask("asynchronous('root', 'queue?queue=mail')") == 200  # with ASGI
    for view in ("''", "'dead'", "'limits'", "'schedules'", "'audit'"):
        assert ask(f"get('root', {view})")[0] == 200, view
    assert ask("post('root', 'pause', queue='mail', act='pause')")[0] == 303
    assert center.queues.paused() == {"mail"}
    task = "task='shop.pay', args='[7, 1]'"
    assert ask(f"post('anna', 'send', {task})")[0] == 403
    assert ask("allow('anna', 'read_center', 'write_center')") == 2
    assert ask(f"post('anna', 'send', {task})")[0] == 403  # any task is for who operates
    assert ask(f"post('root', 'send', {task}, queue='sms')")[0] == 303
    assert center.counts("sms").ready == 1
    put = f"{task}, act='put', name='nightly', when='@daily'"
    assert ask(f"post('anna', 'schedules', {put})")[0] == 403
    status, text, _ = ask(f"post('root', 'schedules', {put}, grace='soon')")
    assert status == 422 and 'name="grace" value="soon"' in text
    assert ask(f"post('root', 'schedules', {put})")[0] == 303
    assert ask("get('root', 'schedules', name='nightly')")[0] == 200


def checked(ask: Asked, *names: str) -> str:
    """What ``manage.py check`` says, with these settings."""
    arguments = ", ".join(map(repr, ("check", *names)))
    said = ask(
        "[out := __import__('io').StringIO(), "
        f"call_command({arguments}, stdout=out, stderr=out), out.getvalue()][-1]"
    )
    assert isinstance(said, str)
    return said


def test_without_a_library_the_admin_has_no_pages_of_tasks_and_says_what_is_missing(
    ask: Asked,
) -> None:
    index = ask("of('root').get('/admin/').content.decode()")
    assert "Pending tasks" not in index and "Ended tasks" not in index
    for model in ("pendingtask", "endedtask"):
        assert ask(f"of('root').get('/admin/celery_toc/{model}/').status_code") == 403
    said = checked(ask)
    assert "(celery_toc.I001) the current app of Celery has no task library" in said
    assert "celery toc library create" in said
    said = checked(ask, "--database", "default")
    assert "(celery_toc.W001) the task library has no table toc_pending_0, " in said
    found = "str(__import__('celery_toc.django.apps').django.apps.check_settings())"
    ask("setattr(settings, 'TOC_LIBRARY_DATABASE', 'elsewhere')")
    refused = ask(found)
    assert "celery_toc.E001" in refused and "'elsewhere', which is not among DATABASES" in refused
    ask("settings.DATABASES.update(elsewhere={})")
    refused = ask(found)
    assert "celery_toc.E002" in refused and "LibraryRouter" in refused
