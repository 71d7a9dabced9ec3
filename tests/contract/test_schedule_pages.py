"""Where schedules are: pages of them by queue and name, and one by its name, whatever others there
are."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from celery import Celery

from celery_toc import Task, TaskCenter, timeout_center
from celery_toc.web.operations import page_of_schedules
from kombu_toc import ReplicationError, ScheduleChange, ScheduleFiring, TimeoutCenter
from kombu_toc.center import schedules
from kombu_toc.http import Token, new_token

from ..support.cases import each
from ..support.cluster import Cluster
from ..support.fixtures import own_server
from ..support.http_server import HttpServer
from ..support.page_visitor import Visitor, audit
from ..support.servers import Server
from ..support.waiting import wait_until

QUEUES = ["a", "a b", "a%b", "a:b", "b{c}", "täsk", "z\0z", "\U0001f600"]
NAMES = sorted(["n", "n:1", "n%00", "ñ", "n/2", "o"])

LATER = 4 * 10**15

APP = """
from celery import Celery

app = Celery("shop", broker={broker!r}, backend="disabled://", set_as_current=False)
app.conf.toc_web_mask = ["card"]


@app.task(name="shop.remind", shared=False)
def remind(*args):
    pass


@app.task(name="shop.pay", shared=False)
def pay(order, card=""):
    pass
"""


def put(center: TimeoutCenter, queue: str, name: str) -> None:
    firing = ScheduleFiring(f"{name}@1", b"", LATER)
    made = ScheduleChange(name, "", f"{name}@1", LATER, b"template", put=firing)
    assert center.recurring.change(queue, made).done


def delete(center: TimeoutCenter, queue: str, name: str) -> None:
    gone = ScheduleChange(name, f"{name}@1", "", take_out=f"{name}@1")
    assert center.recurring.change(queue, gone).done


def listed(center: TimeoutCenter, limit: int = 3) -> list[tuple[str, str]]:
    """All schedules, in pages of queues and of schedules."""
    found: list[tuple[str, str]] = []
    queue = ""
    while queues := center.recurring.topics(after=queue, limit=2):
        queue, name = queues[-1], ""
        while queues:
            page, behind = center.recurring.by_name(queues, limit, name)
            assert len(page) <= limit
            found += [(one.topic, one.name) for one in page]
            if behind is None:
                break
            last, name = behind
            queues = queues[queues.index(last) + (not name) :]
    return found


def named(center: TimeoutCenter, limit: int, after: str = "") -> tuple[list[str], Any]:
    """The names of a page of one queue, and behind what it goes on."""
    page, behind = center.recurring.by_name(["mail"], limit, after)
    return [one.name for one in page], behind


def places(center: TimeoutCenter, name: str) -> list[str]:
    return [one.topic for one in center.recurring.find(name)[1]]


def noted(center: TimeoutCenter) -> list[bytes]:
    """All that is kept of where schedules are."""
    keys = center.keys
    found: list[bytes] = center.client.zrange(keys.schedule_places, 0, -1)
    return found


def test_pages_have_every_schedule_once_by_queue_and_name(center: TimeoutCenter) -> None:
    for queue in reversed(QUEUES):
        for name in reversed(NAMES):
            put(center, queue, name)
    every = [(queue, name) for queue in QUEUES for name in NAMES]
    for limit in (1, 3, 7, 100):
        assert listed(center, limit) == every
    assert center.recurring.topics() == center.recurring.topics(limit=100) == QUEUES
    assert center.recurring.topics(prefix="a", after="a b", limit=100) == ["a%b", "a:b"]
    assert center.recurring.topics(prefix="a", after="a b") == ["a%b", "a:b"]
    assert all(places(center, name) == QUEUES for name in NAMES)
    found = center.recurring.find_many(NAMES)[1]
    assert [[one.topic for one in found[name]] for name in NAMES] == [QUEUES] * len(NAMES)
    assert places(center, "N") == places(center, "") == []
    assert len(center.recurring.by_name(QUEUES, 1000).schedules) == len(every) == len(noted(center))


@own_server
def test_schedules_that_lie_together_are_found_by_one_command(center, client) -> None:
    """An import looks for thousands before it puts them."""
    names = [f"each-{number:02d}" for number in range(50)]
    for name in names:
        put(center, "mail", name)
    for some, calls in ((names, 1), (names[:9], 1), (["each-00", "each-1x", "each-49"], 4)):
        client.config_resetstat()
        found = center.recurring.find_many(some)[1]
        assert {name for name in some if found[name]} == {*some} & {*names}
        assert client.info("commandstats")["cmdstat_zrange"]["calls"] == calls


def test_a_queue_goes_with_its_last_schedule(center: TimeoutCenter, client: redis.Redis) -> None:
    for queue in ("mail", "sms"):
        for name in ("one", "two"):
            put(center, queue, name)
    names = center.registry.topic("mail").slot(0).schedule_names
    # Nobody has read them, and so mended them.
    assert client.zrange(names, 0, -1) == [b"one", b"two"]
    delete(center, "mail", "one")
    assert client.zrange(names, 0, -1) == [b"two"]
    assert center.recurring.topics(limit=9) == ["mail", "sms"]
    assert places(center, "one") == ["sms"]
    delete(center, "mail", "two")
    assert center.recurring.topics(limit=9) == center.recurring.topics() == ["sms"]
    center.queues.delete("sms")
    assert center.recurring.topics(limit=9) == [] == noted(center)
    put(center, "mail", "two")
    assert listed(center) == [("mail", "two")]
    delete(center, "mail", "two")
    assert center.queues.delete("mail", if_empty=True, settle=0)
    assert client.keys("*schedule*") == []


def test_what_is_put_while_the_last_one_is_deleted_stays_noted(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who puts one has noted it before, and does it again afterwards; who deletes one looks again.
    So one of them is the last to know, whoever is faster."""
    other = TimeoutCenter(center.client)
    remove, run_each_put = center.recurring.places.remove, other.runner.run_each_put
    for before in (True, False):
        put(center, "mail", "old")

        def remove_in_between(*what: Any, before: bool = before, is_empty: bool) -> None:
            monkeypatch.setattr(center.recurring.places, "remove", remove)
            if before:
                put(other, "mail", "new")
            remove(*what, is_empty=is_empty)
            if not before:
                put(other, "mail", "new")

        monkeypatch.setattr(center.recurring.places, "remove", remove_in_between)
        delete(center, "mail", "old")
        assert listed(center) == [("mail", "new")]
        assert (places(center, "new"), len(noted(center))) == (["mail"], 1)
        delete(center, "mail", "new")

    put(center, "mail", "old")

    def put_late(calls: Any) -> Any:
        """All of the deletion comes between what is noted and what is put."""
        monkeypatch.setattr(other.runner, "run_each_put", run_each_put)
        delete(center, "mail", "old")
        return run_each_put(calls)

    monkeypatch.setattr(other.runner, "run_each_put", put_late)
    put(other, "mail", "new")
    assert listed(center) == [("mail", "new")]
    assert places(center, "new") == ["mail"]


def test_what_was_noted_and_never_put_is_found_nowhere(center: TimeoutCenter) -> None:
    center.recurring.places.note("mail", ["lost"])
    assert center.recurring.topics(limit=9) == ["mail"]
    assert listed(center) == [] == places(center, "lost")
    assert noted(center) == [] == center.recurring.topics()


def test_a_page_may_have_more_queues_than_are_asked_together(center: TimeoutCenter) -> None:
    queues = [f"q{number:03}" for number in range(2 * schedules.TOPICS_TOGETHER + 10)]
    for queue in queues[::2]:
        put(center, queue, "a")
    for limit in (5, 50, 99, 100, 105, 1000):
        found: list[str] = []
        rest, name, behind = queues, "", (queues[0], "")
        while behind is not None:
            page, behind = center.recurring.by_name(rest, limit, name)
            found += [one.topic for one in page]
            if behind is not None:
                assert len(page) == limit
                name = behind[1]
                rest = queues[queues.index(behind[0]) + (not name) :]
        assert found == queues[::2]


def test_a_page_has_what_is_put_after_its_schedules_were_counted(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is deleted then is left out; the page goes on behind it."""
    for name in "abc":
        put(center, "mail", name)
    run_all = center.runner.run_all

    def change_before(calls: Any) -> Any:
        monkeypatch.undo()
        put(center, "mail", "bb")
        delete(center, "mail", "a")
        return run_all(calls)

    monkeypatch.setattr(center.runner, "run_all", change_before)
    assert named(center, 4) == (["b", "bb", "c"], None)
    assert named(center, 2) == (["b", "bb"], ("mail", "bb"))
    assert named(center, 2, "bb") == (["c"], None)


class Told:
    """In the place of the library: what it hears."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []

    def scheduled(self, topic: str, change: ScheduleChange, at_us: int) -> None:
        self.changes.append((change.name, change.wanted))


def test_the_library_hears_of_a_change_whatever_happens_to_its_place(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()

    def broken(*args: Any) -> Any:
        raise redis.ConnectionError("cut")

    recurring = center.recurring
    monkeypatch.setattr(center, "recorder", told)
    note = recurring.places.note
    with monkeypatch.context() as patched:
        patched.setattr(recurring.places, "note", broken)
        with pytest.raises(redis.ConnectionError):
            put(center, "mail", "a")
        assert told.changes == [] == recurring.read("mail", ["a"])[1]
        # It is noted before, and cannot be noted again.
        left = [note, broken]
        patched.setattr(recurring.places, "note", lambda *args: left.pop(0)(*args))
        with pytest.raises(redis.ConnectionError):
            put(center, "mail", "a")
    assert told.changes == [("a", "a@1")]
    assert places(center, "a") == ["mail"]
    with monkeypatch.context() as patched:
        patched.setattr(recurring.places, "gone", broken)
        delete(center, "mail", "a")
    assert told.changes == [("a", "a@1"), ("a", "")]
    # The place is left, until somebody looks there.
    assert len(noted(center)) == 1
    assert places(center, "a") == [] == noted(center)
    assert recurring.topics() == []


def test_the_library_hears_of_a_change_that_too_few_replicas_have(center: TimeoutCenter) -> None:
    put(center, "mail", "a")
    other = TimeoutCenter(center.client, wait_replicas=1, wait_timeout=0.01)
    told = other.recorder = Told()
    with pytest.raises(ReplicationError):
        delete(other, "mail", "a")
    assert told.changes == [("a", "")]
    assert noted(center) == []


# -- over HTTP


@pytest.fixture
def tasks(server: Server | Cluster, client: redis.Redis) -> Iterator[TaskCenter]:
    app = Celery("shop", broker=server.toc_url, set_as_current=False)
    app.task(name="shop.remind", shared=False)(print)
    yield timeout_center(app)
    app.close()


def web(server: Server | Cluster, folder: Path, *options: str, **environment: str) -> HttpServer:
    """The page and the API of an app, whose module is in this folder."""
    (folder / "pageshop.py").write_text(APP.format(broker=server.toc_url))
    there = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}", **environment}
    command = ("-m", "celery", "-A", "pageshop", "toc", "web")
    return HttpServer(server.toc_url, *options, command=command, environment=there)


@pytest.fixture(scope="module")
def app_server(
    server: Server | Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpServer]:
    """For who sits at the machine."""
    with web(server, tmp_path_factory.mktemp("app")) as made:
        yield made


@pytest.fixture
def visitor(app_server: HttpServer) -> Visitor:
    made = Visitor(app_server)
    made.get("schedules?new=1")
    return made


Serve = Callable[..., tuple[HttpServer, dict[str, str]]]


@pytest.fixture
def serve(tmp_path: Path, server: Server | Cluster) -> Iterator[Serve]:
    """Starts one with tokens, whose roles and queues are given: it, and their secrets."""
    with ExitStack() as stack:

        def start(allow: str = "*", **tokens: tuple[str, str]) -> tuple[HttpServer, dict[str, str]]:
            made = {name: new_token(name, *given) for name, given in tokens.items()}
            lines = ";".join(line for _, line in made.values())
            api = web(server, tmp_path, "--allow", allow, TOC_HTTP_TOKENS=lines)
            return stack.enter_context(api), {name: secret for name, (secret, _) in made.items()}

        yield start


def pages(api: HttpServer, secret: str = "", limit: int = 3, more: str = "") -> list[str]:
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        at = f"&after={quote(after, safe='')}" if after else ""
        page = ask(api, f"/v1/schedules?limit={limit}{more}{at}", secret).json
        assert len(page["schedules"]) <= limit
        found += [one["name"] for one in page["schedules"]]
        after = page["nextPageToken"]
    return found


def ask(api: HttpServer, path: str, secret: str, method: str = "GET") -> Any:
    return api.ask(method, path, headers={"authorization": f"Bearer {secret}"} if secret else {})


def test_the_api_has_every_schedule_once(tasks: TaskCenter, serve: Serve) -> None:
    every = []
    for queue, number in product(QUEUES, range(4)):
        every.append(f"{queue}: {number}".replace("\0", "0"))
        tasks.schedules.put(every[-1], "shop.remind", 3600 - number, queue=queue)
    api, _ = serve()
    for limit in (1, 3, 4, 100):
        assert pages(api, limit=limit) == every
        assert pages(api, limit=limit, more="&queue=a%20b") == every[4:8]
    assert pages(api, more="&queue=none") == []
    # What is put or goes meanwhile changes nothing for the others.
    first = api.get("/v1/schedules?limit=5").json
    tasks.schedules.delete(every[4])
    tasks.schedules.put("late", "shop.remind", 60, queue="a")
    tasks.schedules.pause(every[0])
    after = quote(first["nextPageToken"], safe="")
    assert api.get(f"/v1/schedules?limit=2&after={after}").json["schedules"][0]["name"] == every[5]
    tasks.center.queues.delete("a%b")
    assert pages(api) == [*every[:4], "late", *every[5:8], *every[12:]]
    for wrong in ("a:b:c", ":x", "a:", "a%3A"):
        assert api.get(f"/v1/schedules?after={wrong}").status == 422
    assert api.get("/v1/schedules?queue=a&after=b:x").status == 422


@each("behind, more", [(("a:b", "ñ"), "a%3Ab:%C3%B1"), (("a:b", ""), "a%3Ab"), (None, None)])
@each("queue", [None, "a:b"])
def test_an_answer_says_where_a_page_has_ended(
    behind: Any, more: str | None, queue: str | None
) -> None:
    class Empty:
        async def queues(self, **asked: Any) -> list[str]:
            return ["a:b"]

        async def page(self, queues: list[str], **asked: Any) -> Any:
            assert queues == ["a:b"]
            return [], behind

    token = Token("one", b"", ("read",), ("*",))
    found = asyncio.run(page_of_schedules(Empty(), token, 3, queue=queue))
    assert found == ([], more)


def test_a_back_fill_whose_client_has_gone_is_sent_to_its_end(
    tasks: TaskCenter, app_server: HttpServer
) -> None:
    """Which takes a second and a half, so it is no job."""
    tasks.schedules.put("hourly", "shop.remind", 3600)
    since = datetime.fromtimestamp(time.time() - 9100 * 3600, timezone.utc).isoformat()
    body = json.dumps({"startTime": since, "limit": 10_000, "rate": 1000}).encode()
    head = (
        "POST /v1/schedules/hourly:backfill HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", app_server.port), timeout=30) as raw:
        raw.sendall(head.encode() + body)
        wait_until(lambda: tasks.center.counts("celery").waiting > 1, 30)
    wait_until(lambda: tasks.center.counts("celery").waiting >= 9000, 60)


def test_a_token_sees_the_schedules_of_its_queues(tasks: TaskCenter, serve: Serve) -> None:
    every = [f"{queue}/{n}" for queue in ("mail", "sms-1", "sms-2", "zoo") for n in range(3)]
    for name in every:
        tasks.schedules.put(name, "shop.remind", 3600, queue=name.partition("/")[0])
    api, secrets = serve(
        sms=("read", "sms-*"),
        all=("read,operate", "*"),
        ends=("read,operate", "*-2,mail"),
        writer=("write", "*"),
    )
    for limit in (1, 2, 3, 100):
        assert pages(api, secrets["all"], limit) == every
        assert pages(api, secrets["sms"], limit) == every[3:9]
        assert pages(api, secrets["ends"], limit) == every[:3] + every[6:9]
    # Also behind one that it does not see.
    behind = ask(api, "/v1/schedules?after=mail:mail%2F1", secrets["sms"]).json
    assert behind["schedules"][0]["name"] == "sms-1/0"
    for path, status in (
        ("/v1/schedules/sms-1%2F0", 200),
        ("/v1/schedules/sms-1%2F0/history", 200),
        ("/v1/schedules/zoo%2F0", 404),
        ("/v1/schedules/zoo%2F0/history", 404),
        ("/v1/schedules/none", 404),
        ("/v1/schedules?queue=sms-1", 200),
        ("/v1/schedules?queue=zoo", 403),
    ):
        assert ask(api, path, secrets["sms"]).status == status, path
        assert ask(api, path, secrets["all"]).status == (404 if "none" in path else 200), path
        assert ask(api, path, secrets["writer"]).status == 403, path
    # To change one needs a token for all queues.
    assert ask(api, "/v1/schedules/mail%2F0:pause", secrets["ends"], "POST").status == 403
    assert ask(api, "/v1/schedules/mail%2F0:pause", secrets["all"], "POST").status == 200

    visitor = Visitor(api)
    assert visitor.sign_in(secrets["ends"]).status == 303
    shown = visitor.get("schedules").body.decode()
    assert [one for one in every if one in shown] == every[:3] + every[6:9]
    assert 'href="schedules"' in shown and "Pause" not in shown
    assert visitor.get("schedules?name=mail%2F0").status == 200
    assert visitor.get("schedules?name=zoo%2F0").status == 404
    assert visitor.post("schedules", name="mail/0", act="resume").status == 403


# -- on the page


def boxes(reply: Any) -> dict[str, str]:
    """What is in the fields of a form."""
    text = unescape(reply.body.decode())
    found = dict(re.findall(r'<input name="(\w+)" value="([^"]*)"', text))
    found.update(re.findall(r'<textarea name="(\w+)"[^>]*>\n([^<]*)<', text))
    for name, options in re.findall(r'<select name="(\w+)"[^>]*>(.*?)</select>', text):
        [found[name]] = re.findall(r"<option selected>(\w+)", options) or [""]
    return found


def test_the_page_puts_changes_and_deletes_a_schedule(tasks: TaskCenter, visitor: Visitor) -> None:
    shown = visitor.get("schedules?new=1")
    assert b'<option value="shop.pay">' in shown.body
    assert b"these are the tasks that this process has loaded" in shown.body
    made = {"name": "nightly", "task": "shop.pay", "when": "0 3 * * 1-5", "args": "[7]"}
    rules = {"kwargs": '{"card": "4111"}', "misfire": "skip", "overlap": "wait", "maxRuns": "9"}
    rules |= {"timezone": "Europe/Berlin", "grace": "1h30m", "exclude": "2030-12-25, 2031-01-01"}
    rules |= {"start": "2026-01-31 09:30", "end": "2040-01-01", "jitter": "1.5s"}
    reply = visitor.post("schedules", act="put", **made, **rules)
    assert b"nightly is put." in visitor.follow(reply).body
    found = tasks.schedules.get("nightly")
    assert found is not None
    told = (found.task, found.text, found.args, found.kwargs)
    assert told == ("shop.pay", "0 3 * * 1-5", [7], {"card": "4111"})
    told = (found.misfire, found.overlap, found.max_runs, found.grace, found.jitter)
    assert told == ("skip", "wait", 9, 5400, 1.5)
    assert found.start == datetime(2026, 1, 31, 9, 30, tzinfo=timezone.utc)
    assert (found.timezone, [one.year for one in found.exclude]) == ("Europe/Berlin", [2030, 2031])
    assert found.edits[0].by == "this machine (page)"
    # Sent back as it is shown, nothing is changed, and what is hidden stays.
    shown = visitor.get("schedules?name=nightly&edit=1")
    assert b"4111" not in shown.body and boxes(shown)["args"] == "[7]"
    kept = {"act": "put", "name": "nightly", "edit": "1"}
    assert visitor.post("schedules", **kept, **boxes(shown)).status == 303
    same = tasks.schedules.get("nightly")
    assert same is not None and same.fingerprint == found.fingerprint
    changed = {**boxes(shown), "when": "every 5 min", "end": "", "args": "[8]"}
    assert visitor.post("schedules", **kept, **changed).status == 303
    found = tasks.schedules.get("nightly")
    assert found is not None and (found.text, found.end) == ("every 5 min", None)
    assert (found.args, found.kwargs) == ([8], {"card": "4111"})
    shown = visitor.get("schedules?name=nightly&delete=1")
    assert b"What has fired already goes on" in shown.body and tasks.schedules.get("nightly")
    reply = visitor.send(shown, "Delete")
    assert b"nightly is deleted." in visitor.follow(reply).body
    assert tasks.schedules.get("nightly") is None
    assert {(one[0], one[3]) for one in audit(tasks.center)} == {("this machine", "nightly")}
    acts = [one[1] for one in audit(tasks.center)]
    assert acts == ["put schedule"] * 3 + ["delete schedule"]


GOOD = {"name": "x", "task": "shop.remind", "when": "30s", "args": "[1]", "grace": "1m"}


@pytest.mark.parametrize(
    "view, field, typed, text",
    [
        ("schedules", "name", "", "It is missing"),
        ("schedules", "name", "taken", "There is a schedule of this name"),
        ("schedules", "task", "shop.none", "No worker has registered 'shop.none'"),
        ("schedules", "when", "0 3 * *", "'0 3 * *' has 4 fields, not five"),
        ("schedules", "when", "0s", "It must be from 0.001"),
        ("schedules", "args", '{"a": 1}', "It must be array, not object"),
        ("schedules", "kwargs", "{", "It is not JSON"),
        ("schedules", "timezone", "Mars/Base", "'Mars/Base' is no time zone"),
        ("schedules", "grace", "soon", "'soon' "),
        ("schedules", "overlap", "never", "It must be one of"),
        ("schedules", "start", "soon", "'soon' is not a time"),
        ("schedules", "maxRuns", "many", "It must be a whole number"),
        ("schedules", "exclude", "christmas", "It must be days such as"),
        ("schedules", "", "", "it ends before it starts"),
        ("send", "task", "shop.none", "No worker has registered 'shop.none'"),
        ("send", "args", "[", "It is not JSON"),
        ("send", "kwargs", "[]", "It must be object, not array"),
        ("send", "eta", "soon", "'soon' is not a time"),
        ("send", "args", "[1, 2, 3]", "takes from 1 to 2 positional arguments"),
    ],
)
def test_a_form_that_cannot_be_used_comes_back_with_what_was_typed(
    tasks: TaskCenter, visitor: Visitor, view: str, field: str, typed: str, text: str
) -> None:
    tasks.schedules.put("taken", "shop.remind", 60)
    good = {**GOOD, "act": "put"}
    if "positional" in text:
        good["task"] = "shop.pay"
    good.update({field: typed} if field else {"start": "2031-01-01", "end": "2030-01-01"})
    reply = visitor.post(view, **good)
    assert reply.status == 422, reply
    shown = unescape(reply.body.decode())
    assert text in shown
    marked = re.findall(r'name="(\w+)"[^>]* aria-invalid="true" aria-describedby="wrong"', shown)
    assert marked == ([field] if field else [])
    there = boxes(reply)
    left = {name: said for name, said in good.items() if name in there and said != "never"}
    assert left.items() <= there.items()
    assert len(there) == (15 if view == "schedules" else 5)
    assert audit(tasks.center) == [] and tasks.schedules.count() == 1
    assert tasks.counts("celery").ready == 0


def test_the_page_sends_a_task_once(tasks: TaskCenter, visitor: Visitor) -> None:
    shown = visitor.get("send?queue=mail")
    assert boxes(shown)["queue"] == "mail"
    [id] = re.findall(r'name="id" value="([^"]+)"', shown.body.decode())
    form = {"id": id, "act": "send", "task": "shop.pay", "args": "[7]"}
    form["kwargs"] = '{"card": "4111-1111-1111"}'
    for said in (b"shop.pay was sent.", b"It was sent before."):
        reply = visitor.post("send", **form, eta="2h", queue="mail")
        there = visitor.follow(reply)
        assert said in there.body and b"4111-1111-1111" not in there.body
    [found] = tasks.scan("mail", where=lambda task: task.name == "shop.pay").messages
    sent = Task(tasks.app, found)
    assert (sent.id, sent.args, sent.kwargs) == (id, [7], {"card": "4111-1111-1111"})
    assert abs(found.time_us / 1e6 - time.time() - 7200) < 60
    assert tasks.counts("mail").scheduled == 1
    [done] = audit(tasks.center)
    assert done[:4] == ["this machine", "send", "mail", f"shop.pay {id}"]


def test_who_may_start_what_on_the_page(tasks: TaskCenter, serve: Serve) -> None:
    rights = {"reader": ("read", "*"), "mail": ("read,write", "mail")}
    api, secrets = serve("shop.remind", **rights, all=("read,write,operate", "*"))
    tasks.schedules.put("there", "shop.remind", 60)

    def visitor(name: str) -> Visitor:
        made = Visitor(api)
        assert made.sign_in(secrets[name]).status == 303
        return made

    remind = {"task": "shop.remind", "args": "[7]", "act": "send"}
    reader, mail, everyone = visitor("reader"), visitor("mail"), visitor("all")
    assert b'href="send"' not in reader.get("").body and b'href="send"' in mail.get("").body
    assert reader.get("send").status == 403 and reader.post("send", **remind).status == 403
    for view in ("schedules?new=1", "schedules?name=there&edit=1", "schedules?name=there&delete=1"):
        assert mail.get(view).status == 403 and everyone.get(view).status == 200
    assert mail.post("schedules", **{**GOOD, "act": "put"}).status == 403
    assert mail.post("schedules", name="there", act="delete").status == 403
    shown = mail.get("send").body
    assert b'"shop.remind"' in shown and b'"shop.pay"' not in shown and b"--allow NAME" in shown
    assert mail.post("send", **remind, queue="mail").status == 303
    assert mail.post("send", **remind, queue="sms").status == 403
    for one, form in ((mail, {}), (everyone, {}), (everyone, {"queue": "mail"})):
        assert one.post("send", **{**remind, "task": "shop.pay"}, **form).status == 403
    assert everyone.post("schedules", **{**GOOD, "task": "shop.pay", "act": "put"}).status == 403
    assert everyone.post("send", proof="forged", **remind).status == 403
    assert tasks.counts("mail").ready == 1 and tasks.schedules.count() == 1
    [done] = [one for one in audit(tasks.center) if one[1] == "send"]
    assert done[:3] == ["mail", "send", "mail"]


def test_a_schedule_that_the_form_cannot_have_is_not_changed_by_it(
    tasks: TaskCenter, visitor: Visitor
) -> None:
    then = tasks.app.signature("shop.remind", args=[2])
    tasks.schedules.put("chained", tasks.app.signature("shop.remind", link=then), 60)
    tasks.schedules.put("owned", "shop.remind", 60, owner="a program")
    for name, text in (("chained", "callbacks or a chain"), ("owned", "by 'a program'")):
        before = tasks.schedules.get(name)
        shown = visitor.get(f"schedules?name={name}&edit=1")
        assert shown.status == 409 and text in unescape(shown.body.decode())
        reply = visitor.post("schedules", **{**GOOD, "act": "put", "edit": "1", "name": name})
        assert reply.status == 409 and tasks.schedules.get(name) == before
