"""The page: looks that its viewers share, and what is not shown."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import redis

from kombu_toc import TimeoutCenter, pack
from kombu_toc.http import Request, api_for, page
from kombu_toc.http import Visitor as Sitting
from kombu_toc.http.page import snapshots
from kombu_toc.http.tokens import NOBODY

from ..support.cluster import Cluster
from ..support.fixtures import own_server
from ..support.http_server import HttpServer
from ..support.inspection import calls_of, put_some
from ..support.page_visitor import Visitor, wait_for
from ..support.servers import Server


@pytest.mark.timeout(150)
def test_of_many_dead_letters_those_that_died_lately_are_grouped(local: Visitor) -> None:
    number, lately = 2_060, 30
    local.center.put_many("mail", [{"id": f"m-{n}", "body": b"{}"} for n in range(number)])
    while messages := local.center.pop("mail", 500).messages:
        for message in messages:
            local.center.reject(message, requeue=False, error="OSError: no route")
    assert local.center.counts("mail").dead == number
    wait_for(local, "dead", "that died within the last")
    kept = {f"m-{n}" for n in range(lately)}
    for slot in local.center.registry.topic("mail").all_slots():
        for id in local.center.client.zrange(slot.dead, 0, -1):
            if id.decode() not in kept:  # two days earlier, as scores have it
                local.center.client.zincrby(slot.dead, -2 * 86_400_000_000, id)
    shown = wait_for(
        local, "dead", f"These are the {lately} that died within the last day", seconds=90
    )
    assert f"of {number:,}." in shown
    # What is done to the group is done to all that are like it.
    begun = local.post("all", queue="mail", act="purge", state="dead", error="OSError: no route")
    job = begun.headers["location"]
    wait_for(local, job, f"{number:,} messages match.")


@pytest.mark.cluster
def test_what_is_done_to_a_group_is_done_to_no_other(local: Visitor, center: TimeoutCenter) -> None:
    parts = {"content-type": "application/json", "content-encoding": "utf-8"}
    named = {"headers": {"task": "shop.a"}, "properties": {}, **parts, "body": b"[[],{},{}]"}
    task = pack(named, deflate=False)
    died = {
        "plain": (b"x", "", ""),
        "failed": (b"x", "", "OSError: no route"),
        "told": (b"x", "bad\naddress", ""),
        "of a task": (task, "", ""),
        "of a task that failed": (task, "", "OSError: no route"),
        "in Hebrew": (b"x", "\u05e8\u05e2\u200f", "ValueError: \u05e8\u05e2\u200f"),
    }
    for id, (body, reason, error) in died.items():
        center.put("mail", id, body)
        [message] = center.pop("mail").messages
        center.reject(message, requeue=False, reason=reason, error=error)
    left = set(died)
    while left:
        wait_for(local, "dead", f"{len(left)} dead")
        shown = local.get("dead")
        job = local.send(shown, "Delete").headers["location"]
        wait_for(local, job, "1 message matches.")
        local.send(local.get(job), "Delete 1")
        wait_for(local, job, "Done: 1 message deleted.")
        now = {one.id for one in center.scan("mail").messages}
        assert len(left - now) == 1
        left = now


@pytest.mark.cluster
def test_a_group_leads_to_its_own_messages_and_the_filters_from_there_to_others(
    local: Visitor, center: TimeoutCenter
) -> None:
    for id, error in (("a", ""), ("b", "OSError: no route")):
        center.put("mail", id, b"x")
        center.reject(center.pop("mail").messages[0], requeue=False, error=error)
    deadline = time.monotonic() + 10
    links: list[str] = []
    while len(links) < 2:  # how many are dead may be known before all are grouped
        assert time.monotonic() < deadline, links
        links = re.findall(r'<a href="(queue[?][^"]*alike[^"]*)"', local.get("dead").body.decode())
    shown = [local.get(unescape(one)) for one in links]
    rows = [re.findall(r'href="message[?][^"]*id=(.)"', one.body.decode()) for one in shown]
    assert sorted(rows) == [["a"], ["b"]]
    alone = shown[rows.index(["a"])]
    assert "Just the dead messages of no task in mail" in alone.body.decode()
    every = local.send(alone, "Show").body.decode()
    assert len(re.findall(r'href="message[?]', every)) == 2


def test_of_large_dead_letters_it_is_said_which_are_grouped(local: Visitor) -> None:
    for number in range(6):
        local.center.put("mail", f"m-{number}", b"x" * 900_000)
        local.center.reject(
            local.center.pop("mail").messages[0], requeue=False, error=f"OSError: {number}"
        )
    shown = wait_for(local, "dead", ", of 6.")
    assert "These are the first 3 that died within the last" in shown


@pytest.mark.cluster
def test_of_many_queues_with_dead_letters_those_with_the_most_are_shown(local: Visitor) -> None:
    for n in range(53):
        local.center.put_many(
            f"d-{n}", [{"id": f"m-{k}", "body": b"{}"} for k in range(2 if n else 3)]
        )
        for message in local.center.pop(f"d-{n}", 5).messages:
            local.center.reject(message, requeue=False, error="OSError: no route")
    shown = wait_for(local, "dead", "and 3 queues with fewer")
    assert shown.count("<h2>") == 50
    assert shown.index("3 dead") < shown.index("2 dead")


def test_what_is_hidden_is_in_no_view(local: Visitor, center: TimeoutCenter) -> None:
    body = json.dumps({"card": "4111-1111", "to": {"name": "anna"}}).encode()
    center.put("mail", "order-7", body, key="card/4111-1111")
    [taken] = center.pop("mail").messages
    center.reject(taken, requeue=False, error="ValueError: card 4111-1111 is stolen")
    for view in (
        "queue?queue=mail&state=any",
        "queue?queue=mail&state=dead&text=4111",
        "message?queue=mail&id=order-7",
        "dead",
    ):
        shown = local.get(view).body.decode()
        assert "4111-1111" not in shown, view
    assert "anna" in local.get("message?queue=mail&id=order-7").body.decode()
    assert "4111-1111" not in wait_for(local, "dead", "••••")


def test_what_is_hidden_is_hidden_from_a_token_that_only_reads(
    server: Server | Cluster, center: TimeoutCenter, tokens: Any
) -> None:
    args = [[7, "4111-1111"], {"card": "4111-1111", "to": "anna"}, {}]
    message = {
        "headers": {"task": "shop.pay", "argsrepr": "(7, '4111-1111')", "x-card": "4111-1111"},
        "properties": {},
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "body": json.dumps(args).encode(),
    }
    center.put("mail", "paid", pack(message, deflate=True, id="paid"), key="4111-1111")
    center.put("mail", "plain", b'{"card": "4111-1111", "to": "anna"}')
    for one in center.pop("mail", 10).messages:
        center.reject(one, requeue=False, error="ValueError: card 4111-1111 is stolen")
    center.put("mail", "text", b"4111-1111", delay=3600)
    paths = ["/v1/queues/mail/tasks/paid", "/v1/queues/mail/tasks", "/v1/queues/mail/dead"]
    paths += ["/v1/queues/mail/tasks/plain", "/v1/queues/mail/tasks?bodies=false"]

    def ask(server: HttpServer, path: str, name: str = "") -> Any:
        sent = {"authorization": f"Bearer {tokens[name][0]}"} if name else {}
        reply = server.get(path, headers=sent)
        assert reply.status == 200, reply
        return reply

    lines = ";".join(tokens[name][1] for name in ("anna", "ben", "carl"))
    hiding = ["--mask", "*card", "--anonymous-read"]
    with HttpServer(server.toc_url, *hiding, environment={"TOC_HTTP_TOKENS": lines}) as made:
        for path in paths:
            for name in ("ben", ""):  # who may only read, and everybody
                reply = ask(made, path, name)
                assert b"4111" not in reply.body, (path, reply)
            # Who may write may lease them, as they are.
            assert b"4111-1111" in ask(made, path, "carl").body
        paid = ask(made, paths[0], "ben").json
        assert json.loads(paid["text"]) == ["••••", {"card": "••••", "to": "anna"}, {}]
        assert paid["headers"] == {"task": "shop.pay", "x-card": "••••"}
        assert (paid["key"], paid["error"]) == ("••••", "ValueError: card •••• is stolen")
        whole = ask(made, paths[0], "carl").json
        assert {*paid} == {*whole} and json.loads(whole["text"]) == args
        plain = ask(made, paths[3], "ben").json
        assert json.loads(plain["text"]) == {"card": "••••", "to": "anna"}
        assert {*plain} == {*ask(made, paths[3], "carl").json}
    with HttpServer(server.toc_url, environment={"TOC_HTTP_TOKENS": lines}) as made:
        assert json.loads(ask(made, paths[0], "ben").json["text"]) == args


@pytest.mark.parametrize("mask", ["card", "X-Key"])
def test_keys_that_wait_are_hidden_if_the_mask_names_them(
    server: Server | Cluster, center: TimeoutCenter, mask: str
) -> None:
    center.queues.declare("keyed", key_concurrency=1)
    put_some(center, "keyed", ("a", "b"), key="card-4111")
    assert len(center.pop("keyed", 2).messages) == 1
    with HttpServer(server.toc_url, "--mask", mask) as made:
        shown = made.get("/page/limits?queue=keyed").body.decode()
    assert ("card-4111" in shown, "••••" in shown) == (mask == "card", mask != "card")


@own_server
@pytest.mark.one_server("it counts the calls of a server")
def test_many_viewers_are_one_to_the_broker(server: Server, center: TimeoutCenter) -> None:
    """At most one look a second, whoever looks."""
    for queue in ("mail", "sms"):
        center.queues.declare(queue)
    with HttpServer(server.toc_url) as made, ThreadPoolExecutor(8) as pool:
        assert made.get("/page/").status == 200
        began, before = time.monotonic(), calls_of(center.client)
        replies = list(pool.map(lambda _: made.get("/page/").status, range(300)))
        took = time.monotonic() - began
        assert replies == [200] * 300
        # One script for each slot of a queue, and one for what comes due of those with something.
        assert calls_of(center.client) - before <= (took + 2) * 2 * 2 * 8


@pytest.mark.cluster
@pytest.mark.parametrize("together", [1, 3, 100])
def test_a_look_counts_the_same_however_many_queues_are_looked_at_together(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr(snapshots, "TOGETHER", together)
    center.queues.declare("q-empty")
    for n in range(40):  # in all slots: ready, scheduled, in flight, dead
        center.put("q-mixed", f"ready-{n}", b"x")
    for n in range(3):
        center.put("q-mixed", f"soon-{n}", b"x", delay=90 + 60 * n)
        center.put("q-later", f"later-{n}", b"x", delay=90_000)
    taken = center.pop("q-mixed", 10).messages
    for one in taken[:4]:
        center.reject(one, requeue=False)
    looks = snapshots.SnapshotCache(None)  # type: ignore[arg-type]
    for number in (1, 2):  # of the second one, minutes that are over are known
        seen = looks.take(center, frozenset(("hour",)), number)
        rows = {row.queue: row for row in seen.rows}
        mixed = rows["q-mixed"]
        counts = mixed.counts
        assert (counts.ready, counts.scheduled, counts.in_flight, counts.dead) == (30, 3, 6, 4)
        assert mixed.waiting == 33 and mixed.oldest > 0
        assert [mixed.due[edge] for edge in (0.0, 60.0, 120.0, 180.0, 3600.0)] == [
            30,
            30,
            31,
            32,
            33,
        ]
        assert rows["q-later"].due[3600.0] == 0 and rows["q-later"].due[604_800.0] == 3
        assert rows["q-empty"].due == {} and not rows["q-empty"].waiting


@own_server
@pytest.mark.one_server("it counts the calls of a server")
def test_many_viewers_of_a_filter_are_about_one_to_the_broker(
    server: Server, center: TimeoutCenter, client: redis.Redis
) -> None:
    center.put_many(
        "mail", [{"id": f"m-{n}", "body": b'{"to": "anna"}', "delay": 60} for n in range(1_000)]
    )
    view = "/page/queue?queue=mail&text=nobody"
    with HttpServer(server.toc_url) as made, ThreadPoolExecutor(8) as pool:
        made.get(f"{view}-else")  # the scripts are loaded
        before = calls_of(client)
        assert made.get(view).status == 200
        one = calls_of(client) - before
        assert one >= 5  # pages of 100
        sent = {"x-toc-live": "1"}
        replies = list(pool.map(lambda _: made.get(view, headers=sent).status, range(20)))
        assert replies == [200] * 20
        assert calls_of(client) - before <= 5 * one  # and not 21


@pytest.mark.cluster
def test_what_is_done_is_seen_through_a_filter_at_once(local: Visitor) -> None:
    local.center.put_many(
        "mail", [{"id": f"m-{n}", "body": b'{"to": "anna"}', "delay": 60} for n in range(300)]
    )
    local.center.put("mail", "last", b'{"to": "ben"}', delay=3600)
    view = "queue?queue=mail&text=ben"
    assert "message?queue=mail" in local.get(view).body.decode()
    assert local.post("do", queue="mail", id="last", act="cancel", sure="1").status == 303
    for headers in ({"x-toc-live": "1"}, {}):
        assert "message?queue=mail" not in local.get(view, **headers).body.decode()


def test_a_broker_that_hangs_is_told_by_every_view_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path).start()
    sitting = Sitting(NOBODY, "this machine", ("form", ""))

    async def test() -> None:
        api = api_for(server.toc_url)

        async def get(name: str) -> tuple[int, str]:
            scope = {"method": "GET", "headers": [], "query_string": b"queue=mail"}
            request = Request(scope, nothing, [])
            answer = await api.page.answer(name, request, sitting)
            return answer.status, unescape(answer.body.decode())

        await api.center.queues.declare("mail")
        for name in ("queue", "limits"):
            assert (await get(name))[0] == 200
        monkeypatch.setattr(page, "WITHIN", 0.5)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for name in ("queue", "limits"):
                status, shown = await get(name)
                assert status == 503
                assert "the broker has not answered for 0.5 seconds" in shown
        finally:
            os.kill(server.pid, signal.SIGCONT)
            monkeypatch.undo()
        for name in ("queue", "limits"):
            while (await get(name))[0] != 200:
                await asyncio.sleep(0.05)
        await api.aclose()

    async def nothing() -> Any:
        raise AssertionError

    try:
        asyncio.run(asyncio.wait_for(test(), 60))
    finally:
        server.stop()


def test_while_the_first_look_at_very_many_queues_takes_long_it_is_told_how_far_it_is(
    server: Server | Cluster, center: TimeoutCenter
) -> None:
    declared = center.queues.declare("many").declaration.to_json()
    names = [f"many-{number:04}" for number in range(1_500)]
    center.client.hset(center.keys.topics, mapping=dict.fromkeys(names, declared))
    program = (
        "import sys; from kombu_toc.http.page import snapshots; snapshots.WAIT = 0.3;"
        "from kombu_toc.http.__main__ import main; sys.exit(main())"
    )
    with HttpServer(server.toc_url, command=("-c", program)) as made:
        visitor = Visitor(made)
        first = visitor.get("")
        assert first.status == 200, first
        assert "The first look at 1,501 queues is under way." in first.body.decode()
        assert "<progress" in first.body.decode()
        wait_for(visitor, "", "many-0001")
    center.client.flushall()


def test_a_filter_looks_on_by_itself_and_shows_how_far_it_is(local: Visitor) -> None:
    tasks = [
        {
            "id": f"m{number:05}",
            "body": b'{"to": "needle"}' if number % 7_000 == 6_999 else b'{"to": "hay"}',
            "delay": 3600 + number,
        }
        for number in range(21_000)
    ]
    local.center.put_many("mail", tasks)
    view = "queue?queue=mail&text=needle"
    first = local.get(view).body.decode()
    assert "<progress" in first and "Next page" not in first
    wait_for(local, view, "m06999")
    last = wait_for(local, view, "m20999")
    assert "m13999" in last
    for _ in range(100):
        last = local.get(view).body.decode()
        if "<progress" not in last:
            break
        time.sleep(0.05)
    assert "<progress" not in last and "Next page" not in last
