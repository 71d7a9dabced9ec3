"""The HTTP API, as a process of its own: put, pull, queues, and what becomes of bad requests."""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import re
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import psutil
import pytest
import redis

from kombu_toc import TimeoutCenter, pack
from kombu_toc.exporter import metrics_text
from kombu_toc.model.message import compress

from ..support.cases import each
from ..support.fixtures import own_server
from ..support.http_server import HttpServer
from ..support.inspection import put_some
from ..support.servers import Server

MAIL = "/v1/queues/mail"


def leased(api: HttpServer, limit: int = 10, **fields: Any) -> list[Any]:
    reply = api.post(f"{MAIL}:lease", {"limit": limit, **fields})
    assert reply.status == 200, reply
    found: list[Any] = reply.json["tasks"]
    return found


def test_a_message_is_put_read_moved_made_due_leased_extended_and_acknowledged(
    api: HttpServer, center: TimeoutCenter
) -> None:
    """Y7"""
    made = api.post(f"{MAIL}/tasks", {"id": "order-7", "text": "remind", "delay": 3600})
    assert (made.status, made.json["name"]) == (201, "queues/mail/tasks/order-7")
    assert center.get("order-7")[0].body == b"remind"
    found = api.get(f"{MAIL}/tasks/order-7").json
    assert (found["state"], found["text"]) == ("waiting", "remind")
    moved = api.post(
        f"{MAIL}/tasks/order-7:reschedule", {"scheduleTime": "2035-01-01T01:30:00.5+01:30"}
    )
    assert moved.json["scheduleTime"] == "2035-01-01T00:00:00.500000Z"
    assert center.get("order-7")[0].time_us == 2051222400_500000
    assert leased(api) == []
    assert api.post(f"{MAIL}/tasks/order-7:run").status == 200
    [task] = leased(api, visibility=600)
    assert (task["id"], task["text"], task["failures"]) == ("order-7", "remind", 0)
    held = api.get(f"{MAIL}/tasks/order-7").json
    assert held["state"] == "inFlight"
    receipts = {"receipts": [task["receipt"]]}
    assert api.post(f"{MAIL}:extend", {**receipts, "visibility": 3600}).json["extended"] == 1
    assert api.get(f"{MAIL}/tasks/order-7").json["leaseExpireTime"] > held["leaseExpireTime"]
    assert api.post(f"{MAIL}:ack", receipts).json == {"acknowledged": 1, "stale": []}
    late = api.post(f"{MAIL}:ack", receipts).json
    assert late == {"acknowledged": 0, "stale": receipts["receipts"]}
    assert api.get(f"{MAIL}/tasks/order-7").status == 404


@each(
    "said, kept",
    [
        ({"text": "täsk \N{SNOWMAN}"}, "täsk \N{SNOWMAN}".encode()),
        ({"text": ""}, b""),
        ({"json": {"b": [1, None, "ü"]}}, b'{"b":[1,null,"\\u00fc"]}'),
        ({"json": None}, b"null"),
        ({"body": "/wAB"}, b"\xff\x00\x01"),
    ],
    ids=["text", "empty", "json", "null", "bytes"],
)
def test_what_is_put_is_what_a_center_reads_and_what_is_leased(
    api: HttpServer, center: TimeoutCenter, said: dict[str, Any], kept: bytes
) -> None:
    id = api.post(f"{MAIL}/tasks", said).json["id"]
    assert center.get(id)[0].body == kept
    [task] = leased(api)
    assert task["id"] == id
    assert task.get("body") == said["body"] if "body" in said else task["text"] == kept.decode()


def test_what_a_center_puts_is_leased_also_an_envelope(api: HttpServer) -> None:
    message = {
        "headers": {"task": "shop.remind"},
        "properties": {},
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "body": b"[7]",
    }
    api.center.put("mail", "plain", b'{"h": 1}', priority=0)
    api.center.put("mail", "packed", pack(message, deflate=False), priority=3)
    api.center.put("mail", "small", pack(message, deflate=True, id="small"), priority=6)
    plain, *packed = leased(api)
    assert plain["text"] == '{"h": 1}' and "headers" not in plain
    for one in packed:
        assert (one["text"], one["contentType"]) == ("[7]", "application/json")
        assert one["headers"] == {"task": "shop.remind"}


LINE = b'{"h":%b,"p":{},"t":%b,"e":"utf-8"}\nbody'
UUID = b'{"__type__":"uuid","__value__":{"hex":"0af7651916cd43dd8448eb211c80319c","version":4}}'

#: Messages that a Python process may put, and that are hard to show.
ODD = {
    "uuid": lambda: LINE % (b'{"x":%b}' % UUID, b'"a/b"'),
    "number": lambda: LINE % (b'{"x":NaN,"y":-Infinity}', b'"a/b"'),
    "deep": lambda: LINE % (b'{"x":%b}' % (b"[" * 900 + b"]" * 900), b'"a/b"'),
    "kind": lambda: LINE % (b"{}", b'{"a":1}'),
    "half": lambda: LINE % (b'{"x":"\\ud800"}', b'"a/b"'),
    "bomb": lambda: compress(b"0" * (1 << 27)),
    "bomb of a body": lambda: compress(LINE % (b"{}", b'"a/b"') + b"0" * (1 << 27)),
}


@each("name", ODD)
def test_what_is_hard_to_show_is_shown_and_holds_nothing_up(api: HttpServer, name: str) -> None:
    api.center.put("mail", "odd", ODD[name]())
    api.center.put("mail", "plain", b"x")

    def strict(reply: Any) -> Any:
        assert reply.status == 200, reply.body[:500]
        assert len(reply.body) < 1 << 20

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        return json.loads(reply.body, parse_constant=refuse)

    assert strict(api.get(f"{MAIL}/tasks/odd"))["id"] == "odd"
    listed = strict(api.get(f"{MAIL}/tasks"))["tasks"]
    found = strict(api.post(f"{MAIL}:lease", {"limit": 10}))["tasks"]
    for tasks in (listed, found):
        assert {one["id"] for one in tasks} == {"odd", "plain"}
        odd = next(one for one in tasks if one["id"] == "odd")
        if name == "uuid":
            assert odd["headers"] == {"x": "0af76519-16cd-43dd-8448-eb211c80319c"}
        if name == "number":
            assert odd["headers"] == {"x": "NaN", "y": "-Infinity"}
    assert psutil.Process(api.process.pid).memory_info().rss < 500 << 20
    receipts = {"receipts": [one["receipt"] for one in found]}
    assert api.post(f"{MAIL}:ack", receipts).json["acknowledged"] == 2


def test_a_queue_may_have_a_slash_or_a_colon_in_its_name(api: HttpServer) -> None:
    api.post("/v1/queues/a%2Fb%3Alease/tasks", {"id": "one", "text": "x"})
    assert api.center.get("one")[0].topic == "a/b:lease"
    assert api.post("/v1/queues/a%2Fb%3Alease:lease").json["tasks"][0]["id"] == "one"
    api.center.put("plain:colon", "two", b"x")
    assert api.get("/v1/queues/plain:colon/counts").json["ready"] == 1
    assert api.get("/v1/queues/plain:colon").json["name"] == "plain:colon"


def test_a_name_is_the_path_of_one_message(api: HttpServer, center: TimeoutCenter) -> None:
    made = {}
    for queue, id in (
        ("a/tasks/b", "c"),
        ("a", "b/tasks/c"),
        ("a", "b%2Ftasks%2Fc"),
        ("a b", "?#"),
    ):
        path = f"/v1/queues/{quote(queue, safe='')}/tasks"
        put = api.post(path, {"id": id, "text": f"{queue} {id}", "delay": 60}).json
        [listed] = [one for one in api.get(path).json["tasks"] if one["id"] == id]
        assert listed["name"] == put["name"]
        made[put["name"]] = f"{queue} {id}"
    assert len(made) == 4
    for name, text in made.items():
        assert api.get(f"/v1/{name}").json["text"] == text
        assert api.post(f"/v1/{name}:run").json["name"] == name
    for queue in ("a/tasks/b", "a", "a b"):
        center.queues.delete(queue)


def test_many_are_put_in_order_and_a_list_repeated_by_its_key_adds_nothing(
    api: HttpServer, client: redis.Redis
) -> None:
    tasks = {"tasks": [{"id": f"m{n}", "text": str(n), "delay": 60} for n in range(300)]}
    headers = {"idempotency-key": "list 7"}
    first = api.post(f"{MAIL}/tasks:batch", tasks, headers=headers)
    assert first.status == 201
    assert [one["id"] for one in first.json["tasks"]] == [f"m{n}" for n in range(300)]
    assert {one["outcome"] for one in first.json["tasks"]} == {"added"}
    client.delete(*client.scan_iter("*answer:*"))  # nobody knows any more what was answered
    again = api.post(f"{MAIL}/tasks:batch", tasks, headers=headers)
    assert {one["outcome"] for one in again.json["tasks"]} == {"repeated"}
    assert api.get(f"{MAIL}/counts").json["scheduled"] == 300
    api.post(f"{MAIL}/tasks:batch", tasks)
    assert api.get(f"{MAIL}/counts").json["scheduled"] == 600


def test_each_put_is_a_message_and_only_its_key_says_that_one_is_repeated(
    api: HttpServer, client: redis.Redis
) -> None:
    """Also beside one in flight, as that of a handler which puts its job again, and a dead one."""
    task = {"id": "refund-7", "text": "look"}
    assert api.post(f"{MAIL}/tasks", task).json["outcome"] == "added"
    [job] = leased(api)
    assert api.post(f"{MAIL}/tasks", {**task, "delay": 60}).json["outcome"] == "added"
    assert api.post(f"{MAIL}:ack", {"receipts": [job["receipt"]]}).status == 200
    assert api.get(f"{MAIL}/counts").json["scheduled"] == 1
    api.post(f"{MAIL}/tasks", task)
    [job] = leased(api)
    assert api.post(f"{MAIL}:reject", {"receipts": [job["receipt"]], "dead": True}).status == 200
    assert api.post(f"{MAIL}/tasks", task).json["outcome"] == "added"
    counts = api.get(f"{MAIL}/counts").json
    assert (counts["ready"], counts["scheduled"], counts["dead"]) == (1, 1, 1)
    headers = {"idempotency-key": "k"}
    api.post(f"{MAIL}/tasks", task, headers=headers)
    client.delete(*client.scan_iter("*answer:*"))
    assert api.post(f"{MAIL}/tasks", task, headers=headers).json["outcome"] == "repeated"
    assert api.post(f"{MAIL}/tasks/refund-7:cancel").json["cancelled"] == 4


def test_a_task_put_by_its_id_replaces_the_one_that_waits(api: HttpServer) -> None:
    path = f"{MAIL}/tasks/order-7"
    first = api.ask("PUT", path, {"text": "old", "delay": 3600})
    assert (first.status, first.json["outcome"], first.json["id"]) == (201, "added", "order-7")
    headers = {"idempotency-key": "k"}
    for outcome in ("replaced", "repeated"):
        reply = api.ask("PUT", path, {"text": "new", "delay": 60}, headers=headers)
        assert (reply.status, reply.json["outcome"]) == (200, outcome)
    [found] = api.center.get("order-7")
    assert found.body == b"new"
    assert api.center.queues.coming("mail", [120]) == [1]
    api.post(f"{path}:run")
    leased(api)
    assert api.ask("PUT", path, {"text": "newer"}).json["outcome"] == "added"
    api.center.put("mail", "other", b"x", delay=60, basis="elsewhere")
    reply = api.ask("PUT", f"{MAIL}/tasks/other", {"text": "y"})
    assert (reply.status, reply.json["field"]) == (409, "id")
    assert "another slot basis" in reply.json["detail"]
    assert api.ask("PUT", path, {"text": "x", "id": "another"}).status == 422


def test_a_list_with_a_field_that_is_wrong_puts_nothing_and_names_it(api: HttpServer) -> None:
    tasks = [{"text": "x"}, {"text": "y"}, {"text": "z", "delay": -1}]
    reply = api.post(f"{MAIL}/tasks:batch", {"tasks": tasks})
    assert (reply.status, reply.json["field"]) == (422, "tasks[2].delay")
    assert api.get(f"{MAIL}/counts").json["ready"] == 0


def test_pages_have_every_message_once_by_state_and_time(api: HttpServer) -> None:
    now = time.time()
    for number in range(130):
        api.center.put("mail", f"m{number:03}", b"x", at=now + 1000 + number)
    api.center.put("mail", "ready", b"x")
    leased(api)
    seen, after, pages = [], "", 0
    while after is not None:
        more = f"&after={after}" if after else ""
        page = api.get(f"{MAIL}/tasks?state=waiting&limit=60&bodies=false{more}").json
        seen += [one["id"] for one in page["tasks"]]
        assert "text" not in page["tasks"][0]
        after, pages = page["nextPageToken"], pages + 1
    assert seen == [f"m{number:03}" for number in range(130)]
    assert pages == 3
    [held] = api.get(f"{MAIL}/tasks?state=inFlight").json["tasks"]
    assert held["id"] == "ready"
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + 1010))
    few = api.get(f"{MAIL}/tasks?state=waiting&until={until}").json["tasks"]
    assert [one["id"] for one in few][:3] == ["m000", "m001", "m002"]
    assert 9 <= len(few) <= 11
    assert api.get(f"{MAIL}/tasks?after=nothing").json["field"] == "after"


@each(
    "after",
    [
        "nothing",
        "[" * 3_000,
        '["mail", 1e400, "eA==", 0, 0]',
        '["mail", Infinity, "eA==", 0, 0]',
        f'["mail", {10**300}, "eA==", 0, 0]',
        f'["mail", 5, "eA==", {10**30}, 0]',
        '["mail", -5, "eA==", 0, -7]',
        '["mail", 5, "eA==", 0, 9e99]',
        '["mail", "5", "eA==", 0, 0]',
        '["mail", true, "eA==", 0, 0]',
        '["mail", 5, {}, 0, 0]',
        '[[], 5, "eA==", 0, 0]',
        '["mail", 5, "\\u00fc", 0, 0]',
    ],
    ids=lambda text: text[:30],
)
@each("path", [f"{MAIL}/tasks", f"{MAIL}/dead", "/page/queue"])
def test_a_page_token_that_somebody_has_made_is_refused(
    api: HttpServer, center: TimeoutCenter, after: str, path: str
) -> None:
    center.put("mail", "one", b"x", delay=60)
    token = after if after == "nothing" else base64.urlsafe_b64encode(after.encode()).decode()
    query = "queue=mail&" if path[1:5] == "page" else ""
    reply = api.get(f"{path}?{query}after={token}")
    assert reply.status == 422, reply
    if not query:
        assert reply.json["field"] == "after"


def test_what_is_in_flight_is_neither_cancelled_nor_moved(api: HttpServer) -> None:
    api.center.put("mail", "held", b"x")
    leased(api)
    api.center.put("mail", "waits", b"x", delay=60)
    for reply in (
        api.ask("DELETE", f"{MAIL}/tasks/held"),
        api.post(f"{MAIL}/tasks/held:cancel"),
        api.post(f"{MAIL}/tasks/held:run"),
    ):
        assert reply.status == 409
        assert reply.headers["content-type"] == "application/problem+json"
    both = api.post(f"{MAIL}/tasks:cancel", {"ids": ["held", "waits", "nobody"]}).json
    assert both["cancelled"] == 1
    assert {one["id"]: one["cancelled"] for one in both["tasks"]} == {"held": False, "waits": True}


def test_what_is_in_flight_is_deleted_if_that_is_asked_for(api: HttpServer) -> None:
    put_some(api.center, "mail", ("one", "two", "three"), body=b"x")
    leased(api)
    for reply in (
        api.ask("DELETE", f"{MAIL}/tasks/one?inFlight=true"),
        api.post(f"{MAIL}/tasks/two:cancel?inFlight=true"),
        api.post(f"{MAIL}/tasks:cancel", {"ids": ["three"], "inFlight": True}),
    ):
        assert (reply.status, reply.json["cancelled"]) == (200, 1)
        assert reply.json["tasks"][0]["state"] == "inFlight"
    assert api.center.counts("mail").in_flight == 0


@each(
    "method, path, document, said, known",
    [
        ("DELETE", f"{MAIL}/tasks/one?inflight=true", None, "inflight", "inFlight"),
        ("POST", f"{MAIL}/tasks/one:cancel", {"inFlight": True}, "inFlight", "none"),
        ("DELETE", f"{MAIL}/tasks/one", {"inFlight": True}, "inFlight", "none"),
        ("POST", f"{MAIL}/tasks/one:run?delay=5", None, "delay", "none"),
        ("POST", f"{MAIL}/tasks/one:run", {"delay": 5}, "delay", "none"),
        ("POST", f"{MAIL}:purge", {"limit": 1}, "limit", "none"),
        ("POST", f"{MAIL}:lease?limit=5", {}, "limit", "none"),
        ("GET", f"{MAIL}/tasks/one?bodies=false", None, "bodies", "none"),
        ("GET", MAIL, {"limit": 1}, "body", ""),
        ("GET", "/healthz?verbose=1", None, "verbose", "none"),
    ],
)
def test_a_parameter_that_nobody_knows_is_refused_and_nothing_is_done(
    api: HttpServer,
    center: TimeoutCenter,
    method: str,
    path: str,
    document: Any,
    said: str,
    known: str,
) -> None:
    center.put("mail", "one", b"x", delay=60)
    reply = api.ask(method, path, document)
    assert (reply.status, reply.headers["content-type"]) == (422, "application/problem+json")
    assert reply.json["field"] == said
    assert known in reply.json["detail"]
    assert center.get("one")[0].state == "waiting"


def test_rejected_messages_come_back_or_die_and_are_requeued_or_purged(api: HttpServer) -> None:
    put_some(api.center, "mail", 4, body=b"x")
    tasks = leased(api)
    back = api.post(
        f"{MAIL}:reject",
        {"receipts": [one["receipt"] for one in tasks[:2]], "error": "no", "backoff": 0},
    ).json
    assert back == {"requeued": 2, "dead": 0, "stale": []}
    again = leased(api)
    assert {one["failures"] for one in again} == {1}
    every = [one["receipt"] for one in (*again, *tasks[2:])]
    gone = api.post(
        f"{MAIL}:reject", {"receipts": every, "dead": True, "reason": "bad", "error": "it is"}
    ).json
    assert gone["dead"] == 4
    dead = api.get(f"{MAIL}/dead").json["tasks"]
    assert {(one["reason"], one["error"], one["state"]) for one in dead} == {
        ("bad", "it is", "dead")
    }
    assert api.post(f"{MAIL}/dead:requeue", {"ids": ["m0"]}).json == {"requeued": 1, "more": False}
    assert api.post(f"{MAIL}/dead:purge", {"limit": 2}).json == {"purged": 2, "more": True}
    for empty in (None, {}):  # it does not mean all of them
        assert api.post(f"{MAIL}/dead:purge", empty).status in (415, 422)
    oldest = api.post(f"{MAIL}/dead:requeue", {"limit": 1000}).json
    assert oldest == {"requeued": 1, "more": False}
    assert api.get(f"{MAIL}/counts").json == {"ready": 2, "scheduled": 0, "inFlight": 0, "dead": 0}


def test_released_messages_come_back_as_they_were(api: HttpServer, center: TimeoutCenter) -> None:
    center.put("mail", "one", b"x")
    [task] = leased(api)
    receipts = {"receipts": [task["receipt"]]}
    assert api.post(f"{MAIL}:release", receipts).json == {"released": 1, "stale": []}
    assert api.post(f"{MAIL}:release", receipts).json["released"] == 0
    [again] = leased(api)
    assert (again["id"], again["failures"]) == ("one", 0)


def test_a_receipt_counts_for_its_own_queue_only(api: HttpServer, center: TimeoutCenter) -> None:
    center.put("sms", "one", b"x")
    [message] = center.pop("sms").messages
    for verb in ("ack", "extend", "release", "reject"):
        reply = api.post(f"{MAIL}:{verb}", {"receipts": [message.receipt]})
        assert (reply.status, reply.json["field"]) == (422, "receipts[0]")
    cut = api.post(f"{MAIL}:ack", {"receipts": [message.receipt[:-5]]})
    assert "damaged" in cut.json["detail"]
    assert center.ack([message]) == 1


def test_queues_are_declared_altered_paused_counted_and_deleted(api: HttpServer) -> None:
    made = api.ask("PUT", "/v1/queues/calls", {"retries": 3, "retryBackoff": 2.5, "slots": 4})
    assert made.status == 200
    assert made.json["limits"]["retryBackoff"] == {"value": 2.5, "source": "declared"}
    assert api.center.queues.describe("calls").slots == 4
    changed = api.ask("PATCH", "/v1/queues/calls", {"retries": 5, "retryBackoff": None})
    assert changed.json["limits"]["retries"]["value"] == 5
    assert changed.json["limits"]["retryBackoff"]["source"] == "default"
    wrong = api.ask("PATCH", "/v1/queues/calls", {"retries": "many"})
    assert (wrong.status, "retries" in wrong.json["detail"]) == (422, True)
    assert api.ask("PATCH", "/v1/queues/calls", {"slots": 8}).status == 422
    assert api.ask("PATCH", "/v1/queues/nobody", {"retries": 5}).status == 404
    api.post("/v1/queues/calls:pause")
    assert api.center.queues.paused() == {"calls"}
    assert api.get("/v1/queues/calls").json["paused"] is True
    api.post("/v1/queues/calls:resume")
    assert api.center.queues.paused() == set()
    for number in range(3):
        api.center.put("calls", f"m{number}", b"x", delay=100 * number)
    assert api.get("/v1/queues/calls/counts?within=150").json == {
        "ready": 1,
        "scheduled": 2,
        "inFlight": 0,
        "dead": 0,
        "due": 2,
    }
    assert [one["name"] for one in api.get("/v1/queues").json["queues"]] == ["calls", "mail", "sms"]
    first = api.get("/v1/queues?limit=2").json
    assert first["nextPageToken"] == "mail"
    assert [one["name"] for one in api.get("/v1/queues?after=mail").json["queues"]] == ["sms"]
    assert api.post("/v1/queues/calls:purge").json["purged"] == 3
    assert api.ask("DELETE", "/v1/queues/calls").json == {"deleted": True}
    assert "calls" not in api.center.queues.names()
    for path in ("", "/counts", "/limits", "/tasks", "/dead"):
        assert api.get(f"/v1/queues/calls{path}").status == 404


def test_what_is_used_of_limits_is_shown(api: HttpServer, center: TimeoutCenter) -> None:
    api.ask("PUT", "/v1/queues/limited", {"concurrency": 2, "rate": "100/s"})
    put_some(center, "limited", 5, body=b"x")
    center.pop("limited", 5)
    found = api.get("/v1/queues/limited/limits").json
    used = {one["name"]: one["used"] for one in found["limits"]}
    assert used["concurrency"] == found["running"] >= 1
    assert found["waiting"] + found["running"] == 5


def test_an_autoscaler_is_told_what_is_ready_in_flight_and_about_to_come(api: HttpServer) -> None:
    for number in range(6):
        api.center.put("mail", f"m{number}", b"x", delay=[0, 0, 0, 200, 200, 9000][number])
    api.center.pop("mail")
    assert api.get("/scale/mail").json["value"] == 3
    assert api.get("/scale/mail?within=300").json == {
        "value": 5,
        "ready": 2,
        "inFlight": 1,
        "due": 4,
    }
    assert api.get("/scale/nobody").json["value"] == 0


def test_a_unique_key_is_kept_replaced_or_refused(api: HttpServer, center: TimeoutCenter) -> None:
    task = {"id": "one", "text": "x", "delay": 60, "unique": "weekly"}
    assert api.post(f"{MAIL}/tasks", task).json["id"] == "one"
    assert api.post(f"{MAIL}/tasks", {**task, "id": "two"}).json["id"] == "one"
    refused = api.post(f"{MAIL}/tasks", {**task, "id": "two", "ifExists": "refuse"})
    assert (refused.status, refused.json["field"], refused.json["id"]) == (409, "unique", "one")
    replaced = {**task, "id": "two", "text": "new", "ifExists": "replace"}
    assert api.post(f"{MAIL}/tasks", replaced).json["id"] == "one"
    [found] = center.get(["one", "two"])
    assert (found.body, found.unique) == (b"new", "weekly")


def test_a_message_keeps_what_it_has_of_its_own(api: HttpServer, center: TimeoutCenter) -> None:
    said = {"visibility": 600, "maxLease": 7200, "expiration": 3600, "key": "anna", "priority": 9}
    # Of a queue of its own: that its messages have slot bases is declared once.
    api.post("/v1/queues/traits/tasks", {"id": "one", "text": "x", **said})
    [found] = center.get("one")
    assert (found.visibility, found.max_lease, found.expiration) == (600, 7200, 3600)
    assert (found.key, found.step) == ("anna", 3)
    shown = api.get("/v1/queues/traits/tasks/one").json
    assert (shown["visibility"], shown["maxLease"], shown["key"]) == (600, 7200, "anna")


# -- bad requests


@each(
    "document, field",
    [
        ({}, "text"),
        ({"text": "x", "json": 1}, "text"),
        ({"text": "x", "dely": 1}, "dely"),
        ({"text": 1}, "text"),
        ({"text": "\ud800"}, "text"),
        ({"body": "?"}, "body"),
        ({"text": "x", "delay": "1"}, "delay"),
        ({"text": "x", "delay": True}, "delay"),
        ({"text": "x", "delay": -1}, "delay"),
        ({"text": "x", "delay": 1e300}, "delay"),
        ({"text": "x", "priority": 1.5}, "priority"),
        ({"text": "x", "scheduleTime": "tomorrow"}, "scheduleTime"),
        ({"text": "x", "scheduleTime": "2026-02-30T00:00:00Z"}, "scheduleTime"),
        ({"text": "x", "scheduleTime": "2026-02-03T00:00:00"}, "scheduleTime"),
        ({"text": "x", "scheduleTime": "9999-01-01T00:00:00Z"}, "scheduleTime"),
        ({"text": "x", "scheduleTime": "2026-01-01T00:00:00Z", "delay": 1}, "delay"),
        ({"text": "x", "id": ""}, "id"),
        ({"text": "x", "headers": {"a": 1}}, "headers.a"),
        ({"text": "x", "uniqueSeconds": 1}, "uniqueSeconds"),
        ([], ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_cannot_be_used_is_named_and_nothing_is_put(
    api: HttpServer, document: Any, field: str
) -> None:
    reply = api.post(f"{MAIL}/tasks", document)
    problem = reply.json
    assert (reply.status, problem["status"]) == (422, 422)
    assert reply.headers["content-type"] == "application/problem+json"
    assert problem["type"] == "urn:celery-toc:invalid-field"
    assert problem.get("field", "") == field
    assert api.get(f"{MAIL}/counts").json["ready"] == 0


@each(
    "raw, statuses, field",
    [
        (b"{", {400}, None),
        (b"\xff", {400}, None),
        (b"", {422}, None),
        (b'{"text": "x", "delay": NaN}', {400}, None),
        (b'{"json": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {400, 422}, ...),
        (b'{"text": "x", "delay": 1' + b"0" * 5000 + b"}", {400, 422}, ...),
        (b'{"text":"x","delay":%b}' % (b"9" * 401), {422}, "delay"),
        (b'{"text":"x","delay":-%b}' % (b"9" * 401), {422}, "delay"),
        (b'{"text":"x","priority":%b}' % (b"9" * 401), {422}, "priority"),
        (b'{"text":"x","delay":1e999}', {400}, None),
        (b'{"json":[-1e999]}', {400}, None),
        (b'{"json":NaN}', {400}, None),
    ],
    ids=[
        *("cut", "no UTF-8", "empty", "NaN", "deep", "very long number"),
        *("long", "below", "whole", "delay", "json", "nan"),
    ],
)
def test_what_is_no_json_and_a_number_that_nothing_holds_are_refused(
    api: HttpServer, raw: bytes, statuses: set[int], field: Any
) -> None:
    """..., where it depends on Python's release what is said of it."""
    reply = api.post(f"{MAIL}/tasks", raw=raw, headers={"content-type": "application/json"})
    assert reply.status in statuses, reply
    assert reply.json["status"] == reply.status
    assert field is ... or reply.json.get("field") == field, reply
    if statuses == {400} and raw.endswith(b"}"):
        event = {"ce-id": "1", "ce-source": "/", "ce-type": "t", "ce-specversion": "1.0"}
        event["content-type"] = "application/json"
        assert api.post(f"{MAIL}/tasks", raw=raw, headers=event).status == 400
    assert api.get("/healthz").status == 200
    assert api.get(f"{MAIL}/counts").json["ready"] == 0


@each(
    "method, path, status",
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/queues/", 404),
        ("PUT", f"{MAIL}/tasks", 405),
        ("POST", f"{MAIL}:nothing", 405),
        ("GET", "/v1/queues/%ff", 400),
        ("GET", f"{MAIL}/tasks?limit=0", 422),
        ("GET", f"{MAIL}/tasks?limit=x", 422),
        ("GET", f"{MAIL}/tasks?state=gone", 422),
        ("GET", f"{MAIL}/tasks?unknown=1", 422),
        ("GET", f"/v1/queues/{'x' * 20_000}", 400),
    ],
)
def test_what_is_not_there_says_so(api: HttpServer, method: str, path: str, status: int) -> None:
    reply = api.ask(method, path)
    assert (reply.status, reply.json["status"]) == (status, status)
    if status == 405:
        assert reply.headers["allow"]


def test_without_a_library_nothing_is_found_in_it(api: HttpServer) -> None:
    for path in ("tasks?bizId=42", "tasks/order-7"):
        refused = api.get(f"/v1/library/{path}")
        assert (refused.status, refused.headers["content-type"]) == (
            404,
            "application/problem+json",
        )
        assert "set toc_library in the broker's URL" in refused.json["detail"]


def test_a_body_that_is_not_json_needs_its_type(api: HttpServer) -> None:
    reply = api.post(f"{MAIL}/tasks", raw=b'{"text": "x"}', headers={"content-type": "text/plain"})
    assert (reply.status, reply.json["field"]) == (415, "content-type")


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01 TLS\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n"]
)
def test_what_is_no_http_is_answered_by_a_problem(api: HttpServer, raw: bytes) -> None:
    reply = api.raw(raw)
    assert (reply.status, reply.headers["content-type"]) == (400, "application/problem+json")
    assert reply.json["type"] == "urn:celery-toc:bad-request"


@pytest.mark.parametrize(
    "head, status",
    [
        ("upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\ncontent-length: 15", 400),
        ("upgrade: h2c\r\nconnection: upgrade\r\ntransfer-encoding: chunked", 400),
        ("upgrade: websocket\r\nconnection: upgrade\r\ncontent-length: 15", 400),
        ("upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 0", 422),
        ("upgrade: h2c\r\nconnection: upgrade", 422),
    ],
    ids=["h2c", "chunked", "websocket", "empty", "no body"],
)
def test_a_body_behind_an_upgrade_is_refused_and_does_not_get_lost(
    api: HttpServer, center: TimeoutCenter, head: str, status: int
) -> None:
    put_some(center, "mail", ("one", "two"), body=b"x")
    for message in center.pop("mail", 2).messages:
        center.reject(message, requeue=False)
    body = b'{"ids":["one"]}'
    if "chunked" in head:
        body = b"f\r\n%b\r\n0\r\n\r\n" % body
    if status == 422:
        body = b""
    with socket.create_connection(("127.0.0.1", api.port)) as raw:
        raw.sendall(
            b"POST /v1/queues/mail/dead:purge HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n%b\r\n\r\n%b" % (head.encode(), body)
        )
        raw.settimeout(20)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while some := raw.recv(65_536):  # it closes the connection
                said += some
    assert said.startswith(b"HTTP/1.1 %d " % status), said
    assert b"connection: close" in said
    assert center.counts("mail").dead == 2


def test_a_connection_carries_many_requests(api: HttpServer) -> None:
    connection = api.connect()
    for number in range(50):
        reply = api.post(f"{MAIL}/tasks", {"id": f"m{number}", "text": "x"}, over=connection)
        assert reply.status == 201
    assert api.ask("HEAD", f"{MAIL}/counts", over=connection).body == b""
    assert api.get(f"{MAIL}/counts", over=connection).json["ready"] == 50


# -- repeated requests


def test_a_repeated_request_gets_the_same_answer_and_nothing_is_done_again(api: HttpServer) -> None:
    headers = {"idempotency-key": "k1"}
    first = api.post(f"{MAIL}/tasks", {"text": "x"}, headers=headers)
    api.center.ack(api.center.pop("mail").messages)  # done: a second put would add another
    again = api.post(f"{MAIL}/tasks", {"text": "x"}, headers=headers)
    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers["idempotency-replayed"] == "true"
    assert api.get(f"{MAIL}/counts").json["ready"] == 0
    other = api.post(f"{MAIL}/tasks", {"text": "y"}, headers=headers)
    assert (other.status, other.json["field"]) == (422, "idempotency-key")
    elsewhere = api.post("/v1/queues/sms/tasks", {"text": "x"}, headers=headers)
    assert elsewhere.status == 422


def test_a_repeated_lease_gets_the_same_messages(api: HttpServer, center: TimeoutCenter) -> None:
    put_some(center, "mail", 4, body=b"x")
    headers = {"idempotency-key": "lease-1"}
    first = api.post(f"{MAIL}:lease", {"limit": 2}, headers=headers)
    assert api.post(f"{MAIL}:lease", {"limit": 2}, headers=headers).body == first.body
    assert api.get(f"{MAIL}/counts").json["inFlight"] == 2


def test_the_answer_to_a_lease_is_kept_without_the_bytes_of_its_messages(
    api: HttpServer, center: TimeoutCenter, client: redis.Redis
) -> None:
    put_some(center, "mail", 20, body=b"x" * 100_000)
    headers = {"idempotency-key": "lease-2"}
    first = api.post(f"{MAIL}:lease", {"limit": 20}, headers=headers)
    [kept] = client.scan_iter("*answer:*")
    assert client.strlen(kept) < 20 * 400 + 500
    again = api.post(f"{MAIL}:lease", {"limit": 20}, headers=headers)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.body == first.body and len(again.body) > 2_000_000
    done = [one["receipt"] for one in first.json["tasks"][:5]]
    api.post(f"{MAIL}:ack", {"receipts": done})
    left = api.post(f"{MAIL}:lease", {"limit": 20}, headers=headers).json["tasks"]
    assert left == first.json["tasks"][5:]


def test_a_lease_that_is_answered_again_has_no_message_that_another_consumer_has_by_now(
    api: HttpServer, center: TimeoutCenter
) -> None:
    """Neither one that was put under its id since, nor the same in another delivery."""
    put_some(center, "mail", ("one", "two", "three"), body=b"old")
    headers = {"idempotency-key": "lease-3"}
    first = api.post(f"{MAIL}:lease", {"limit": 3}, headers=headers).json["tasks"]
    center.cancel("one", in_flight=True)
    center.put("mail", "one", b"new")
    [back] = [task["receipt"] for task in first if task["id"] == "two"]
    assert center.release([back]) == 1
    assert len(leased(api)) == 2
    again = api.post(f"{MAIL}:lease", {"limit": 3}, headers=headers).json["tasks"]
    assert [task["id"] for task in again] == ["three"]


def test_of_the_same_request_many_times_at_once_one_is_done(api: HttpServer) -> None:
    def put(_: int) -> int:
        return api.post(f"{MAIL}/tasks", {"text": "x"}, headers={"idempotency-key": "k2"}).status

    with ThreadPoolExecutor(8) as pool:
        statuses = set(pool.map(put, range(40)))
    assert statuses <= {201, 409}
    assert 201 in statuses
    assert api.get(f"{MAIL}/counts").json["ready"] == 1


def test_an_error_of_the_caller_is_repeated_and_an_odd_key_refused(api: HttpServer) -> None:
    headers = {"idempotency-key": "k3"}
    for _ in range(2):
        reply = api.post(f"{MAIL}/tasks/nobody:run", headers=headers)
        assert reply.status == 404
    assert reply.headers["idempotency-replayed"] == "true"
    assert api.post(f"{MAIL}/tasks", {"text": "x"}, headers={"idempotency-key": ""}).status == 422
    long = {"idempotency-key": "k" * 256}
    assert api.post(f"{MAIL}/tasks", {"text": "x"}, headers=long).status == 422


def test_answers_are_kept_for_a_bounded_time(api: HttpServer, client: redis.Redis) -> None:
    api.post(f"{MAIL}/tasks", {"text": "x"}, headers={"idempotency-key": "k4"})
    api.post(f"{MAIL}:lease", headers={"idempotency-key": "k5"})
    [one, two] = sorted(client.ttl(key) for key in client.scan_iter("*answer:*"))
    assert 0 < one <= 300 < two <= 3600


def test_the_answer_to_a_lease_is_kept_no_longer_than_the_lease_lasts(
    api: HttpServer, center: TimeoutCenter, client: redis.Redis
) -> None:
    center.put("mail", "one", b"x", visibility=20)
    center.put("mail", "two", b"x")
    for number, fields in enumerate(({"visibility": 30}, {}, {"visibility": 7})):
        headers = {"idempotency-key": f"k{number}"}
        leases = api.post(f"{MAIL}:lease", {"limit": 2, **fields}, headers=headers).json["tasks"]
        assert len(leases) == 2
        api.post(f"{MAIL}:release", {"receipts": [one["receipt"] for one in leases]})
        seconds = max(client.ttl(key) for key in client.scan_iter("*answer:*"))
        assert seconds <= fields.get("visibility", 20)
        client.delete(*client.scan_iter("*answer:*"))


# -- events and traces


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_goes_along_and_a_repetition_in_another_span_is_the_same_message(
    api: HttpServer, client: redis.Redis
) -> None:
    task = {"id": "one", "text": "x"}
    key = {"idempotency-key": "k"}
    api.post(f"{MAIL}/tasks", task, headers={"traceparent": TRACE, "tracestate": "a=b", **key})
    other = TRACE.replace("b7ad6b7169203331", "00f067aa0ba902b7")
    client.delete(*client.scan_iter("*answer:*"))
    again = api.post(f"{MAIL}/tasks", task, headers={"traceparent": other, **key})
    assert (again.json["id"], again.json["outcome"]) == ("one", "repeated")
    [leased_task] = leased(api)
    assert leased_task["text"] == "x"
    assert leased_task["headers"] == {"traceparent": TRACE, "tracestate": "a=b"}


def test_events_are_accepted_in_both_forms_and_kept_the_same(api: HttpServer) -> None:
    event = {"specversion": "1.0", "id": "e1", "source": "/shop", "type": "paid"}
    binary = {f"ce-{name}": value for name, value in event.items()}
    json_type = {"content-type": "application/json"}
    made = api.post(f"{MAIL}/tasks", raw=b'{"n":1}', headers={**binary, **json_type})
    assert made.json["id"] == "e1"
    structured = {**event, "id": "e2", "datacontenttype": "application/json", "data": {"n": 1}}
    content_type = {"content-type": "application/cloudevents+json; charset=utf-8"}
    trace = {"traceparent": TRACE}
    raw = json.dumps({**structured, "delayseconds": 3600}).encode()
    assert api.post(f"{MAIL}/tasks", raw=raw, headers={**content_type, **trace}).status == 201
    one, two = (json.loads(api.center.get(id)[0].body) for id in ("e1", "e2"))
    assert two.pop("traceparent") == TRACE
    assert two.pop("delayseconds") == 3600
    assert one == {**two, "id": "e1"}
    assert api.center.get("e2")[0].time_us > (time.time() + 3000) * 1e6
    for broken, field in (
        ({**structured, "specversion": "0.3"}, "specversion"),
        ({**structured, "scheduletime": "soon"}, "scheduletime"),
        ({**structured, "Upper": 1}, "Upper"),
        ({key: value for key, value in structured.items() if key != "type"}, "type"),
    ):
        reply = api.post(f"{MAIL}/tasks", raw=json.dumps(broken).encode(), headers=content_type)
        assert (reply.status, reply.json["field"]) == (422, field)


# -- the page


def test_the_walk_with_curl_goes_as_the_page_says(
    api: HttpServer, tmp_path: Any, client: redis.Redis
) -> None:
    import subprocess
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    steps = re.findall(r"```sh\n((?:(?!```).)*)```\n```json\n(.*?)```", page, re.DOTALL)
    assert len(steps) >= 9
    # In one shell: a step may use what the one before has set.
    script = "".join(f"{command}\necho '|||'\n" for command, _ in steps)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={"API": api.url, "PATH": "/usr/bin:/bin:/usr/local/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split("|||\n")[:-1]
    for (command, expected), found in zip(steps, answers, strict=True):
        pattern = re.escape(json.dumps(json.loads(expected))).replace(re.escape('"..."'), '"[^"]*"')
        assert re.fullmatch(pattern, json.dumps(json.loads(found))), (command, found)


def test_a_connection_that_is_closed_in_a_request_harms_nobody(api: HttpServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", api.port)
    connection.putrequest("POST", f"{MAIL}/tasks")
    connection.putheader("content-length", "100")
    connection.endheaders(b'{"text"')
    connection.close()
    assert api.get("/readyz").json == {"status": "ready"}


def test_the_metrics_are_those_of_the_exporter(api: HttpServer, center: TimeoutCenter) -> None:
    center.put("mail", "one", b"x")
    reply = api.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")

    def names(text: str) -> set[str]:
        return {line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    mine = names(reply.body.decode())
    assert 'celery_toc_messages{state="ready",topic="mail"}' in mine
    # Which ones there are; what is counted goes on meanwhile.
    families = {one.partition("{")[0] for one in names(metrics_text(center))}
    assert families - {one.partition("{")[0] for one in mine} <= {"celery_toc_events_total"}


@own_server
@pytest.mark.one_server("it counts the commands of a server")
def test_of_very_many_queues_the_heaviest_have_metrics_and_others_if_they_are_named(
    server: Server, center: TimeoutCenter
) -> None:
    center.queues.declare("mail")
    declared = center.queues.declare("many", slots=1).declaration.to_json()
    names = [f"many-{number:04}" for number in range(1_100)]
    center.client.hset(center.keys.topics, mapping=dict.fromkeys(names, declared))
    center.put("many-1099", "one", b"x")
    center.metrics.send(center.runner)
    with center.client.pipeline(transaction=False) as pipe:
        for name in names[500:600]:
            pipe.hset(center.keys.counted(name), "put", 7)
        pipe.execute()
    with HttpServer(server.toc_url) as api:
        before = center.client.info("stats")["total_commands_processed"]
        text = api.get("/metrics").body.decode()
        assert center.client.info("stats")["total_commands_processed"] - before < 15_000
        told = set(re.findall(r'celery_toc_slots{topic="(.*)"}', text))
        assert len(told) == 1_000 and {"many-1099", *names[500:600]} <= told
        assert re.search(r"celery_toc_topics_left_out 10\d", text)
        some = api.get("/metrics?topic=many-109?,mail").body.decode()
        assert set(re.findall(r'topic="(.*?)"', some)) == {"mail", *names[1_090:]}
        assert "celery_toc_topics_left_out 0" in some


def test_an_answer_leaves_at_once(api: HttpServer) -> None:
    """If its second part waited for the first to be confirmed, each would take 40 ms."""
    connection = api.connect()
    times = [time.monotonic()]
    for _ in range(100):
        assert api.get("/healthz", over=connection).status == 200
        times.append(time.monotonic())
    assert statistics.median(b - a for a, b in itertools.pairwise(times)) < 0.03
