"""The task library in Django: models that read its tables, an admin that shows them (X12, W8)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from kombu_toc.client.options import read_databases
from kombu_toc.library import statuses
from kombu_toc.library.records import Event, Row, now_us
from kombu_toc.library.schema import tables
from kombu_toc.library.shards import Shards
from kombu_toc.library.store import Store

from ..support.cases import each
from ..support.databases import DatabaseServer
from ..support.django_project import ADMIN, ANSWERS, DATABASE, Asked
from ..support.library import shards_of
from .test_library_growth import Reading, ends_of, rows_of

#: A project whose library is not its default database.
PROJECT = """
import json, sys

library, tables, own = sys.argv[1:]

import django
from django.conf import settings

settings.configure(
    **ADMIN,
    DATABASES={
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": own},
        "library": database(library),
    },
    DATABASE_ROUTERS=["celery_toc.django.routers.LibraryRouter"],
    TOC_LIBRARY_DATABASE="library",
    TOC_LIBRARY_TABLES=int(tables),
)
sys.modules["project"] = sys.modules[__name__]
django.setup()
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connections
from django.test import Client
from django.urls import path
from celery_toc.django import models

urlpatterns = [path("admin/", admin.site.urls)]
call_command("migrate", verbosity=0)
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
call_command("migrate", database="library", verbosity=0)
client = Client()
client.force_login(User.objects.create_superuser("root"))

def get(path):
    answer = client.get("/admin/celery_toc/" + path)
    assert answer.status_code == 200, (path, answer.status_code)
    return answer.content.decode()

def refused(change):
    try:
        change()
    except Exception as error:
        return type(error).__name__

def asked(path):
    # What a page asks the library, with all values in it.
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connections["library"]) as queries:
        get(path)
    return [one["sql"] for one in queries if "toc_" in one["sql"]]
"""


def row_of(id: str, number: int, **values: Any) -> Row:
    now = now_us()
    row = Row(
        *(id, f"t{number}", "mail", statuses.PENDING, now + (number - 1) * 1_000_000_000),
        *("shop.expire", "order", str(number), 0, None, None, now, now),
        *(statuses.IN_REDIS, 0, None, "", b"its arguments are secret"),
    )
    return row._replace(**values)


ROWS = [row_of(f"id-{number}", number) for number in range(5)]


def running(engine: DatabaseServer | None, folder: Path, many: int) -> Iterator[Asked]:
    """A project whose library has five tasks, of which two have ended."""
    url = engine.new_url() if engine else f"sqlite:///{folder / 'library.db'}"
    ends = ((ROWS[2], statuses.DONE, ""), (ROWS[3], statuses.DEAD, "ValueError: ü"))
    with shards_of([url], many, create=True) as shards:
        store = Store(shards)
        store.insert([*ROWS, ROWS[1]._replace(token="again", place=statuses.NOT_PUT)])
        store.record(
            [Event(row.key, status, now_us(), 1, "w", said, ({}, 0)) for row, status, said in ends]
        )
    made = Asked("-c", ADMIN + DATABASE + PROJECT + ANSWERS, url, str(many), str(folder / "own"))
    made.url = url
    yield made
    made.end()


@pytest.fixture(scope="module")
def ask(engine, tmp_path_factory) -> Iterator[Asked]:
    """Asks a project whose library has one table of each kind."""
    yield from running(engine, tmp_path_factory.mktemp("project"), 1)


@pytest.fixture
def ask_alone(engine, tmp_path) -> Iterator[Asked]:
    """The same for one test."""
    yield from running(engine, tmp_path, 1)


@pytest.fixture
def ask_of_three(engine, tmp_path) -> Iterator[Asked]:
    """The same with three."""
    yield from running(engine, tmp_path, 3)


def listed(page: str) -> list[str]:
    """The ids in a list of the admin, in their order."""
    return re.findall(r'field-id"><a href="[^"]*">([^<]*)</a>', page)


def test_the_models_read_what_the_library_has(ask: Asked) -> None:
    assert ask("[one.id for one in models.PendingTask.objects.all()]") == [
        *("id-0", "id-1", "id-4", "id-1")
    ]
    assert ask("[one.token for one in models.PendingTask.objects.of(1, 'order')]") == [
        *("t1", "again")
    ]
    assert ask("models.PendingTask.objects.of(1, 'invoice').count()") == 0
    due = ask("models.PendingTask.objects.get(id='id-4').due.timestamp()")
    assert due == ROWS[4].action_us / 1e6
    at = "__import__('datetime').datetime.fromtimestamp({}, __import__('datetime').timezone.utc)"
    until = at.format(ROWS[4].action_us / 1e6)
    assert ask(f"models.PendingTask.objects.due(until={until}).count()") == 3
    assert ask(f"models.PendingTask.objects.due(since={until}).count()") == 1
    said = ask("[(e.id, e.get_status_display(), e.error) for e in models.EndedTask.objects.all()]")
    assert said == [["id-3", "dead", "ValueError: ü"], ["id-2", "done", None]]


def test_they_write_nothing(ask: Asked) -> None:
    for change in (
        "models.PendingTask.objects.all().delete()",
        "models.PendingTask.objects.filter(id='id-1').update(status=2)",
        "models.PendingTask.objects.create(id='id-9')",
        "models.PendingTask.objects.bulk_create([models.PendingTask(id='id-9')])",
        "models.PendingTask.objects.first().save()",
        "models.PendingTask.objects.first().delete()",
    ):
        assert ask(f"refused(lambda: {change})") == "NotSupportedError", change
    assert ask("models.PendingTask.objects.count()") == 4


@each(
    "query, found",
    [
        ("", ["id-0", "id-1", "id-4", "id-1"]),
        ("q=id-4", ["id-4"]),
        ("q=1", ["id-1", "id-1"]),
        ("q=order+1", ["id-1", "id-1"]),
        ("q=invoice+1", []),
        ("status__exact=0", ["id-0", "id-1", "id-4", "id-1"]),
        ("status__exact=1", []),
        ("due=overdue", ["id-0"]),
        ("due=past_hour", ["id-0"]),
        ("due=hour", ["id-4"]),
        ("due=later", []),
    ],
)
def test_pending_tasks_are_found_in_the_admin(ask: Asked, query: str, found: list[str]) -> None:
    # What is due just now may have come due since.
    late = [one for one in found if one != "id-1"] if query.startswith("due") else found
    page = listed(ask(f"get('pendingtask/?{query}')"))
    assert [one for one in page if one != "id-1" or late is found] == late


@each(
    "query, found",
    [("", 2), ("q=id-3", 1), ("q=2", 1), ("status__exact=9", 1), ("ended=0", 2), ("ended=7", 2)],
)
def test_ended_tasks_are_found_in_the_admin(ask: Asked, query: str, found: int) -> None:
    assert len(listed(ask(f"get('endedtask/?{query}')"))) == found


def test_a_page_of_a_task_shows_it_and_changes_nothing(ask: Asked) -> None:
    page = ask("get('pendingtask/')")
    links = re.findall(r'href="/admin/celery_toc/([^"]*/change/)', page)
    assert len(set(links)) == 4  # also of two messages of one id
    said = ask(f"get({links[3]!r})")
    assert "again" in said and "not in Redis yet" in said
    assert "secret" not in page + said
    assert 'name="_save"' not in said and "deletelink" not in said
    assert ask(f"client.post('/admin/celery_toc/{links[3]}', {{'status': 2}}).status_code") == 403
    assert ask("client.get('/admin/celery_toc/pendingtask/add/').status_code") == 403
    [link] = re.findall(r'href="/admin/celery_toc/([^"]*/change/)', ask("get('endedtask/?q=id-3')"))
    assert "ValueError: ü" in ask(f"get({link.partition('?')[0]!r})")
    assert "shop.expire" in ask("get('pendingtask/id-4/change/')")  # a link by the id alone


def test_a_list_is_counted_up_to_a_bound(ask: Asked) -> None:
    admin = "__import__('celery_toc.django.admin').django.admin"
    ask(f"setattr({admin}, 'COUNTED', 3)")
    assert "3 pending tasks" in ask("get('pendingtask/')")
    ask(f"setattr({admin}, 'COUNTED', 10_000)")


PAGES = (
    *("pendingtask/", "pendingtask/?p=2", "pendingtask/?status__exact=0", "pendingtask/?o=3.-1"),
    *(f"pendingtask/?due={due}" for due in ("overdue", "hour", "day", "later", "past_day")),
    *("pendingtask/?q=soon7", "pendingtask/?q=order+soon7", "pendingtask/?q=00007-soon"),
    *("endedtask/", "endedtask/?p=2", "endedtask/?status__exact=4", "endedtask/?status__exact=2"),
    *("endedtask/?status__exact=5", "endedtask/?o=7", "endedtask/?q=00007-end"),
    *("endedtask/?q=end7", "endedtask/?q=end7+order", "endedtask/?q=nobody"),
    *(f"endedtask/?ended={ended}" for ended in (0, 1, 7)),
)


OF_ADMIN = "setattr(__import__('celery_toc.django.admin').django.admin{}, {!r}, {})"


def test_pages_of_what_has_ended_have_every_task_once(ask_alone: Asked) -> None:
    ask = ask_alone
    statuses_of = [statuses.DONE, statuses.EXPIRED, statuses.DONE, statuses.CANCELLED]
    ends = [
        end._replace(status=statuses_of[number % 4]) for number, end in enumerate(ends_of(100, 111))
    ]
    with shards_of([ask.url]) as shards:
        Store(shards).record(ends)
    # What has failed first, and the latest of each; two were there before.
    ends.sort(key=lambda end: (-end.status, end.key[0]))
    wanted = [end.key[0] for end in ends]
    wanted.insert(sum(end.status > statuses.DEAD for end in ends), "id-3")
    for size in (1, 2, 4, 5, 12, 13):
        ask(OF_ADMIN.format(".TaskAdmin", "list_per_page", size))
        pages = [
            listed(ask(f"get('endedtask/?p={page}')")) for page in range(1, -(-13 // size) + 1)
        ]
        assert all(len(page) == size for page in pages[:-1])
        assert [id for page in pages for id in page if id != "id-2"] == wanted


def test_a_list_reads_no_more_of_a_library_that_has_grown(ask_alone: Asked) -> None:
    ask = ask_alone
    shards = Shards(read_databases("toc_library", [ask.url]), 1, 5.0)
    store, [database] = Store(shards), shards.databases
    reading, read = Reading(store), {page: [] for page in PAGES}
    day = 86_400_000_000
    if database.dialect.name == "mysql":
        # The tables are as old as what has ended.
        today = now_us() // day
        days = ", ".join(
            f"PARTITION d{one} VALUES LESS THAN ({one + 1})" for one in (today - 9, today)
        )
        table = shards.all[0].tables.history.name
        database.execute(text(f"ALTER TABLE {table} REORGANIZE PARTITION d{today} INTO ({days})"))
    ask(OF_ADMIN.format("", "COUNTED", 40))
    ask(OF_ADMIN.format(".TaskAdmin", "list_per_page", 20))
    try:
        for first, last in ((0, 300), (300, 3000)):
            store.insert(rows_of(first, last))
            ends = ends_of(first, last)
            # Most of them have ended before what the filters show. Of each, there is more than is
            # counted.
            for number, end in enumerate(ends):
                status = statuses.DEAD if number % 5 == 0 else statuses.DONE
                at_us = end.at_us - (number % 7 and 9) * day
                ends[number] = end._replace(status=status, at_us=at_us)
            store.record(ends)
            for table in shards.all[0].tables:
                analyze = f"ANALYZE {'TABLE ' * (database.dialect.name == 'mysql')}{table.name}"
                database.execute(text(analyze))
            for page in PAGES:
                statements = [(one, ()) for one in ask(f"asked({page!r})")]
                assert statements, page
                read[page].append(reading.of_statements(statements))
    finally:
        shards.close()
    grown = {page: pair for page, pair in read.items() if pair[1] > 2 * pair[0] + 100}
    assert grown == {}


def test_migrations_and_routers_leave_the_tables_to_the_library(ask: Asked) -> None:
    assert ask("connections['default'].introspection.table_names().count('toc_pending_0')") == 0
    there = ask("connections['library'].introspection.table_names()")
    assert "toc_pending_0" in there
    assert not [name for name in there if name.startswith("celery_toc")]


def test_each_table_has_a_model(ask_of_three: Asked) -> None:
    ask = ask_of_three
    each = "[getattr(models, f'PendingTask{n or str()}') for n in range(3)]"
    assert ask(f"sum(one.objects.count() for one in {each})") == 4
    assert sum(len(listed(ask(f"get('pendingtask{n or ''}/')"))) for n in range(3)) == 4


def test_the_models_have_the_columns_and_statuses_of_the_library(ask: Asked) -> None:
    for model, table in zip(("PendingTask", "EndedTask"), tables(0), strict=True):
        fields = ask(f"[(f.column, f.null) for f in models.{model}._meta.fields]")
        columns = {column.name: column.nullable for column in table.columns}
        assert {name: columns[name] for name, _ in fields} == dict(fields)
    assert ask("[(one.value, one.label) for one in models.Status]") == [
        list(pair) for pair in statuses.NAMES.items()
    ]
