"""The commands of the task library, and the samples of JSON that docs/commands.md has of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import pools
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

import celery_toc
import kombu_toc
from celery_toc import aio, timeout_center
from celery_toc.web import api_for_app
from kombu_toc import LibraryError
from kombu_toc.http import Request, Token, Visitor
from kombu_toc.library import rebuild
from kombu_toc.library.schema import REVISION

from ..meta.test_commands_page import SAMPLES, assert_alike
from ..support.cases import each
from ..support.commands import answer
from ..support.library import close_libraries
from ..support.waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "library.md").read_text()


@pytest.fixture
def app(server, client, tmp_path) -> Iterator[Celery]:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as app:
        app.conf.broker_transport_options = {"toc_library": f"sqlite:///{tmp_path}/library.db"}
        app.conf.task_default_queue = "mail"

        @app.task(name="shop.mail.remind", shared=False)
        def remind(order: int) -> None: ...

        yield app
    pools.reset()


@pytest.fixture
def run(app) -> Callable[..., Any]:
    """Run a command; return what it prints, and its exit code."""

    def run(*words: str) -> tuple[str, int]:
        said = answer(app, *words)
        return said.out + said.err, said.code

    return run


def send(app: Celery, order: int) -> str:
    return (
        app.tasks["shop.mail.remind"]
        .apply_async((order,), countdown=3600, headers=celery_toc.biz("order", order))
        .id
    )


def test_tasks_are_found_by_their_business_id_and_cancelled(app, run):
    id, _ = send(app, 1007), send(app, 1008)
    printed = json.loads(run("find", "--biz-id", "1007", "--json")[0])
    assert_alike(*SAMPLES["find and history"], printed)
    assert [task["id"] for task in printed["tasks"]] == [id]
    assert id in run("find", "--biz-type", "order", "--since", "30m", "--until", "2h")[0]
    first = json.loads(run("find", "--limit", "1", "--json")[0])
    second = json.loads(run("find", "--limit", "1", "--after", first["after"], "--json")[0])
    assert {first["tasks"][0]["biz_id"], second["tasks"][0]["biz_id"]} == {"1007", "1008"}
    said, code = run("cancel", "--biz-id", "1007", "--yes", "--json")
    assert code == 0
    assert [one["cancelled"] for one in json.loads(said)["results"]] == [True]
    [task] = json.loads(run("history", id, "--json")[0])["tasks"]
    assert task["status"] == "cancelled"
    assert run("cancel", "--biz-id", "1007", "--yes")[1] == 3
    assert run("cancel", "--biz-id", "1007", id, "--yes")[1] == 2
    assert run("history", "no-such-id")[1] == 3


def test_the_tables_are_made_shown_and_pruned(app, run):
    created, status, rebuilt, _, dropped, _ = SAMPLES["library"]
    made = json.loads(run("library", "create", "--json")[0])
    assert_alike(created, made)
    assert len(made["databases"]) == 1
    assert "All tables are there." in run("library", "create")[0]
    assert "All tables are up to date." in run("library", "upgrade")[0]
    send(app, 1)
    printed = json.loads(run("library", "status", "--json")[0])
    assert printed["counts"] == {"pending": 1, "not_put": 0}
    assert_alike(status["databases"], printed["databases"])
    assert REVISION in run("library", "status")[0]
    assert_alike(dropped, json.loads(run("library", "prune", "--json")[0]))
    assert_alike(rebuilt, json.loads(run("library", "rebuild", "--json")[0]))


def test_the_status_of_a_library_that_cannot_be_used_says_why(app, run):
    said, code = run("library", "status")
    assert code == 1
    assert "run 'celery toc library create'" in " ".join(said.split())
    printed, code = run("library", "status", "--json")
    assert (code, json.loads(printed)["counts"]) == (1, {})
    assert run("library", "create")[1] == 0
    assert run("library", "status")[1] == 0


def test_an_option_that_a_driver_does_not_know_is_named(app, run):
    app.conf.broker_transport_options = {"toc_library": "mysql://toc:hunter2@127.0.0.1:1/x?none=1"}
    said, code = run("library", "status")
    assert code == 1
    assert "none" in said and "hunter2" not in said


def test_check_says_what_is_missing_and_mends_it(app, run, client, monkeypatch):
    monkeypatch.setattr("kombu_toc.library.rebuild.UNDER_WAY_US", 0)
    id = send(app, 1)
    assert run("library", "check") == ("The library and Redis agree.\n", 0)
    client.flushall()
    said, code = run("library", "check")
    assert code == 5
    assert "not in Redis" in said and id in said
    assert "Mended 1 disagreement." in run("library", "check", "--fix")[0]
    client.flushall()
    *_, checked, _, _ = SAMPLES["library"]
    assert_alike(checked, json.loads(run("library", "check", "--fix", "--json")[0]))
    assert run("library", "check")[1] == 0


def test_check_leaves_alone_what_has_no_row_by_design(app, monkeypatch):
    monkeypatch.setattr(rebuild, "UNDER_WAY_US", 0)
    send(app, 41)
    center = timeout_center(app)
    center.schedules.put("nightly", "shop.mail.remind", 3600, args=(43,))
    app.tasks["shop.mail.remind"].apply_async(
        (42,), task_id="one", countdown=500, **celery_toc.unique("order-42")
    )
    assert center.library.check(fix=True) == []
    center.schedules.delete("nightly")
    assert center.library.rebuild().put == 0
    assert len(center.get("one")) == 1


def test_a_rebuild_says_what_it_has_put_back(app, run, client):
    for order in range(3):
        send(app, order)
    client.flushall()
    assert "Put 3 messages back, of 3 rows." in run("library", "rebuild")[0]
    assert run("status")[1] == 0


def test_a_rebuild_lists_the_queues_of_which_something_is_lost(app, run, client):
    """Also where nobody has declared them since."""
    center = timeout_center(app).center
    for mode in ("off", "behind", "through"):
        center.queues.declare(f"kept-{mode}", library=mode)
        center.put(f"kept-{mode}", f"order-{mode}", b"x", delay=60)
    recorder = center.recorder.recorder
    recorder.consumes()
    wait_until(lambda: "kept-off" in recorder.store.topics(), 60)
    wait_until(lambda: recorder.store.of_ids(["order-behind"]), 60)
    client.flushall()
    found = json.loads(run("library", "rebuild", "--json")[0])
    assert (found["put"], found["not_kept"], found["behind"]) == (2, ["kept-off"], ["kept-behind"])
    said = run("library", "rebuild")[0]
    assert "Queue kept-off has x-library: off" in said
    assert "Queue kept-behind has x-library: behind" in said


def test_what_is_in_the_library_only_has_a_figure_of_its_own(app, run):
    assert "FAR" not in run("status")[0]
    timeout_center(app).queues.declare("mail", horizon=600)
    for order in range(3):
        send(app, order)
    timeout_center(app).put("other", "x", b"x")
    mail, other = json.loads(run("status", "--json")[0])["topics"]
    assert (mail["far"], mail["scheduled"], "far" in other) == (3, 0, False)
    heading, row, _ = run("status")[0].splitlines()[1:4]
    assert heading.split()[5:7] == ["DEAD", "FAR"]
    assert row.split()[:7] == ["mail", "1", "0", "0", "0", "0", "3"]
    # Who has no library, or cannot reach it, is told that there may be more.
    app.conf.broker_transport_options = {}
    pools.reset()
    assert json.loads(run("status", "--json")[0])["topics"][0]["far"] is None


def test_tasks_are_found_and_tables_shown_without_redis(app, run):
    id = send(app, 1007)
    app.conf.broker_url = "toc+redis://127.0.0.1:1/0"
    said, code = run("find", "--biz-id", "1007")
    assert code == 0
    assert id in said
    assert run("history", id)[1] == run("library", "status")[1] == 0
    assert run("library", "rebuild")[1] == 1


def test_without_a_library_the_commands_say_how_to_have_one(app, run):
    app.conf.broker_transport_options = {}
    for words in (("find",), ("history", "x"), ("library", "status"), ("library", "rebuild")):
        said, code = run(*words)
        assert code == 2
        assert "in its broker_transport_options" in said and "'toc_library': 'sqlite:" in said


def test_the_first_example_of_the_page_works(server, client, tmp_path, run):
    code = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    begin = code[0].replace("toc+redis://localhost:6379/0", server.toc_url)
    begin = begin.replace("/tmp/shop-library.db", f"{tmp_path}/shop.db")
    names: dict[str, Any] = {}
    exec(begin, names)
    names["place"](42)
    client.flushall()
    center = celery_toc.timeout_center(names["app"])
    assert center.library.rebuild().put == 1
    exec(code[1], names)
    assert names["library"].find(biz_id="42").records[0].status == "cancelled"
    pools.reset()


async def test_the_other_examples_of_the_page_work(app, run, server, client, tmp_path):
    def block(text: str) -> str:
        [found] = [one for one in re.findall(r"```python\n(.*?)```", PAGE, re.S) if text in one]
        return found.replace("toc+redis://localhost", server.toc_url).replace(
            "/tmp/", f"{tmp_path}/"
        )

    engine, expire = (
        create_engine(f"sqlite:///{tmp_path}/library.db"),
        app.tasks["shop.mail.remind"],
    )
    orders = Table("orders", MetaData(), Column("id", Integer))
    orders.create(engine)
    library = timeout_center(app).library
    names: dict[str, Any] = {**globals(), "app": app, "expire": expire, "aio": aio}
    names |= {"library": library, "engine": engine, "orders": orders, "kombu_toc": kombu_toc}
    exec(block('shop="berlin"'), names)
    [berlin] = library.find(attributes={"shop": "berlin", "channel": "web"}).records
    assert berlin.biz_id == "42" and library.find(attributes={"shop": "graz"}).records == []
    exec(block("engine.begin()"), names)
    with engine.connect() as connection:
        assert [row.id for row in connection.execute(orders.select())] == [42]
    assert len(library.find(task="shop.mail.remind").records) == 2
    exec(block("center_for("), names)
    [kept] = names["center"].library.history("order-7")
    assert kept.topic == "orders"
    exec(block("await library.cancel("), names)
    await names["place"](43)
    assert len(library.find(biz_id="43", status="pending").records) == 1
    await names["pay"](43)
    await aio.aclose(app)
    assert library.find(biz_id="43").records[0].status == "cancelled"
    engine.dispose()
    close_libraries()


@each("attributes", [{"a b": "x"}, {"shop": None}, {"shop": "x" * 4000}, {"shop": "\0"}, ["shop"]])
def test_attributes_that_cannot_be_kept_are_refused(app, run, attributes):
    remind = app.tasks["shop.mail.remind"]
    with pytest.raises(LibraryError, match=r"x-attributes .*nothing was sent"):
        remind.apply_async((1,), countdown=60, headers={"x-attributes": attributes})
    assert json.loads(run("find", "--json")[0])["tasks"] == []
    assert timeout_center(app).counts("mail").waiting == 0


def test_tasks_are_found_by_their_attributes(app, run):
    remind = app.tasks["shop.mail.remind"]
    for number, shop in enumerate(("berlin", "graz", 'O\'Brien "7"')):
        headers = celery_toc.biz("order", number, shop=shop, number=number)
        remind.apply_async((number,), countdown=3600, headers=headers)
    [found] = json.loads(run("find", "--attribute", "shop=graz", "--json")[0])["tasks"]
    assert found["attributes"] == {"shop": "graz", "number": "1"}
    [found] = json.loads(run("find", "--attribute", 'shop=O\'Brien "7"', "--json")[0])["tasks"]
    assert found["biz_id"] == "2"
    both = run("find", "--attribute", "shop=graz", "--attribute", "number=2", "--json")[0]
    assert json.loads(both)["tasks"] == []
    assert run("find", "--attribute", "shop")[1] == 2
    assert run("find", "--retry", "--yes")[1] == 2


async def test_find_shows_what_the_databases_have_that_answer(app, run, tmp_path):
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(2)]
    app.conf.broker_transport_options = {"toc_library": urls}
    for order in range(20):
        send(app, order)
    assert len(json.loads(run("find", "--task", "shop.mail.remind", "--json")[0])["tasks"]) == 20
    pools.reset()
    close_libraries()
    (tmp_path / "1.db").rename(tmp_path / "kept.db")
    (tmp_path / "1.db").mkdir()
    said, code = run("find", "--task", "shop.mail.remind")
    assert code == 1 and f"{urls[1]} does not answer" in said
    api = api_for_app(app)
    token = Token("t", b"", ["read"], ("*",))
    scope = {"method": "GET", "headers": [], "query_string": b"task=shop.mail.remind"}
    visitor = Visitor(token, "t", ("form", ""), is_trusted=True)
    shown = await api.page.answer("library", Request(scope, None, []), visitor)
    await api.aclose()
    assert f"no answer from {urls[1]}" in shown.body.decode()
    found, by_biz = 0, {}
    for order in range(20):
        said, code = run("find", "--biz-id", str(order), "--json")
        by_biz[order] = code
        found += code == 0 and len(json.loads(said)["tasks"])
    assert 0 < found < 20 and set(by_biz.values()) == {0, 1}
    cancelled = [run("cancel", "--biz-id", str(order), "--yes")[1] for order in range(20)]
    assert [code == 0 for code in cancelled] == [code == 0 for code in by_biz.values()]


def test_show_names_the_library_among_those_that_were_asked_and_says_when_it_is_away(app, run):
    """A message that waits in Redis is shown all the same."""
    id = send(app, 1)
    said, code = run("show", "nothing")
    assert code == 3 and "the failures, the task library, the cancellations never saw it" in said
    pools.reset()
    app.conf.broker_transport_options = {"toc_library": "sqlite:////nowhere/library.db"}
    asked = "the failures, the cancellations never saw"
    for shown, word in ((id, "scheduled"), ("nothing", asked)):
        said, code = run("show", shown)
        assert code == 6 and word in said and "no answer from the task library" in said


def test_a_library_gets_more_tables_by_a_command(app, run, tmp_path):
    for order in range(20):
        send(app, order)
    options = app.conf.broker_transport_options
    assert run("library", "reshard")[1] == 1
    pools.reset()
    close_libraries()
    before = {"toc_library_before": options["toc_library"], "toc_library_tables_before": 1}
    app.conf.broker_transport_options = {**options, **before, "toc_library_tables": 8}
    *_, sample = SAMPLES["library"]
    moved = json.loads(run("library", "reshard", "--json")[0])
    assert_alike(sample, moved)
    assert moved["rows"] == 20 >= moved["moved"] > 10
    assert "Moved 0 rows, of 20 rows." in run("library", "reshard")[0]
    pools.reset()
    close_libraries()
    app.conf.broker_transport_options = {**options, "toc_library_tables": 8}
    for order in range(20):
        assert len(json.loads(run("find", "--biz-id", str(order), "--json")[0])["tasks"]) == 1
