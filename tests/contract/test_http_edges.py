"""The HTTP API at its edges: refused bodies of any size, times, numbers, receipts, lists of which a
part is put, and paths and headers that say two things."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

import pytest

from kombu_toc import TimeoutCenter, center_for
from kombu_toc.http import new_token

from ..support.cases import each, night
from ..support.cluster import Cluster
from ..support.http_server import HttpServer, peak_of, with_tokens
from ..support.servers import Server, frozen

MAIL = "/v1/queues/mail"
JSON = {"content-type": "application/json"}


# -- bodies


@pytest.mark.parametrize("size", [300_000, 10_000_000, 40_000_000])
def test_who_sends_a_large_body_sees_why_it_is_refused(api: HttpServer, size: int) -> None:
    """Also who sends all of it before reading: the connection is not reset."""
    body = b"x" * size
    for path, status in (
        ("/nothing", 404),
        (f"{MAIL}/counts", 405),
        ("/v1/queues/%ff/tasks", 400),
        (f"{MAIL}/tasks", 413 if size > 16 << 20 else 400),
    ):
        reply = api.post(path, raw=body, headers=JSON)
        assert (reply.status, reply.json["status"]) == (status, status), path


def test_a_token_is_refused_before_a_large_body_is_read(server: Server | Cluster) -> None:
    secret, line = new_token("one", "read,write", "mail")
    with with_tokens(server.toc_url, lines=f"{line} rate=1/m") as api:
        body, known = b"x" * 10_000_000, {"authorization": f"Bearer {secret}"}
        for headers, path, status in (
            ({}, f"{MAIL}/tasks", 401),
            (known, "/v1/queues/sms/tasks", 403),
            (known, f"{MAIL}/tasks", 429),
        ):
            reply = api.post(path, raw=body, headers={**JSON, **headers})
            assert reply.status == status, reply


def test_a_body_in_chunks_is_bounded_as_any_other(api: HttpServer) -> None:
    def ask(chunks: int) -> Any:
        return api.raw(
            b"POST /v1/queues/mail/tasks HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            b'9\r\n{"text":"\r\n%b2\r\n"}\r\n0\r\n\r\n'
            % ((b"10000\r\n" + b"x" * 65_536 + b"\r\n") * chunks)
        )

    assert ask(100).status == 201
    refused = ask(400)
    assert (refused.status, refused.json["type"]) == (413, "urn:celery-toc:too-large")


def test_a_connection_goes_on_behind_a_refused_body(api: HttpServer) -> None:
    connection = api.connect()
    for method, path, status in (
        ("POST", "/nothing", 404),
        ("GET", f"{MAIL}/counts", 422),
        ("DELETE", f"{MAIL}/tasks/nobody", 400),
        ("HEAD", f"{MAIL}/counts", 422),
    ):
        assert api.ask(method, path, raw=b"x" * 500_000, over=connection).status == status
        assert api.get(f"{MAIL}/counts", over=connection).status == 200


def test_a_compressed_body_is_refused_and_not_kept_as_it_is(api: HttpServer) -> None:
    raw = gzip.compress(b'{"text": "x"}')
    event = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/", "ce-type": "t"}
    for headers in (JSON, {**event, "content-type": "text/plain"}):
        reply = api.post(f"{MAIL}/tasks", raw=raw, headers={**headers, "content-encoding": "gzip"})
        assert (reply.status, reply.json["field"]) == (415, "content-encoding")
    assert api.center.counts("mail").ready == 0
    plain = {**JSON, "content-encoding": "identity"}
    assert api.post(f"{MAIL}/tasks", raw=b'{"text": "x"}', headers=plain).status == 201


# -- paths and headers


@each(
    "path", ["//v1/queues", "/v1//queues", "/v1/./queues", "/x/../v1/queues", "/v1/queues/", "/V1"]
)
def test_a_path_has_one_form(api: HttpServer, path: str) -> None:
    """A proxy that closes /v1/queues/secret closes all of its forms."""
    assert api.get(path).status == 404


@pytest.mark.parametrize("name", ["x-http-method-override", "x-method-override", "x-http-method"])
def test_a_method_is_the_one_of_the_request(api: HttpServer, name: str) -> None:
    api.center.put("mail", "one", b"x", delay=60)
    assert api.get(f"{MAIL}/tasks/one", headers={name: "DELETE"}).json["state"] == "waiting"
    assert api.get(f"{MAIL}/tasks/one?_method=DELETE").status in (200, 422)
    assert api.center.get("one")


@each(
    "name, one, other",
    [
        ("host", "localhost", "evil.example"),
        ("host", "evil.example", "localhost"),
        ("authorization", "Bearer a", "Bearer b"),
        ("content-type", "application/json", "text/plain"),
        ("idempotency-key", "a", "b"),
    ],
)
def test_a_header_that_says_two_things_is_refused(
    api: HttpServer, name: str, one: str, other: str
) -> None:
    host = "" if name == "host" else "host: localhost\r\n"
    head = f"GET /v1/queues HTTP/1.1\r\n{host}{name}: {one}\r\n{name}: {other}\r\n\r\n"
    reply = api.raw(head.encode())
    assert reply.status == 400
    assert name in reply.json["detail"]


def test_nothing_is_kept_by_a_cache_or_open_to_other_sites(api: HttpServer) -> None:
    api.center.put("mail", "one", b"x", delay=60)
    for reply in (
        api.get(f"{MAIL}/tasks/one"),
        api.get(f"{MAIL}/tasks/nobody"),
        api.ask("OPTIONS", f"{MAIL}/tasks", headers={"access-control-request-method": "POST"}),
        api.get("/v1/queues", headers={"origin": f"http://127.0.0.1:{api.port}"}),
    ):
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in reply.headers if name.startswith("access-control")]


# -- identity


IN_PATHS = [
    "a/b",
    "a:run",
    ":lease",
    "..",
    "a?b#c",
    "a%2fb",
    "%",
    "%00",
    "../../x",
    ".",
    "{x}",
    "#",
]


@each("id", [*IN_PATHS, "\0", "a\0b", "a\nb", " ", "😀" * 500], ids=lambda id: ascii(id)[1:-1][:12])
def test_an_id_is_what_it_is_in_a_path_and_in_a_lease(api: HttpServer, id: str) -> None:
    for queue in ("mail", "sms"):  # the same id in two queues is two messages
        made = api.post(f"/v1/queues/{queue}/tasks", {"id": id, "text": queue, "delay": 60})
        assert (made.status, made.json["id"]) == (201, id)
    path = f"{MAIL}/tasks/{quote(id, safe='')}"
    assert (api.get(path).json["id"], api.get(path).json["text"]) == (id, "mail")
    assert api.post(f"{path}:run").status == 200
    [task] = api.post(f"{MAIL}:lease", {"limit": 2}).json["tasks"]
    assert task["id"] == id
    assert api.post(f"{MAIL}:ack", {"receipts": [task["receipt"]]}).json["acknowledged"] == 1
    assert api.get(path).status == 404
    assert api.center.get(id)[0].topic == "sms"


def test_a_receipt_of_an_earlier_delivery_settles_nothing_but_an_ack(api: HttpServer) -> None:
    """As in Python: who has handled a message has handled it, however late that is said."""
    api.center.put("mail", "one", b"x")
    [first] = api.center.pop("mail").messages
    api.center.release([first])
    [task] = api.post(f"{MAIL}:lease", {"visibility": 60}).json["tasks"]
    old, new = first.receipt, task["receipt"]
    assert old != new
    for verb, name in (("extend", "extended"), ("release", "released"), ("reject", "requeued")):
        told = api.post(f"{MAIL}:{verb}", {"receipts": [old]}).json
        assert (told[name], told["stale"]) == (0, [old]), verb
    assert api.get(f"{MAIL}/tasks/one").json["state"] == "inFlight"
    late = api.post(f"{MAIL}:ack", {"receipts": [old, old]}).json
    assert late == {"acknowledged": 1, "stale": []}
    again = api.post(f"{MAIL}:ack", {"receipts": [new, old]}).json
    assert again == {"acknowledged": 0, "stale": [new, old]}


# -- times


@pytest.mark.parametrize(
    "said, us",
    [
        ("2035-01-01T00:00:00Z", 0),
        ("2035-01-01t00:00:00z", 0),
        ("2035-01-01T00:00:00-00:00", 0),
        ("2035-01-01T23:59:00+23:59", 0),
        ("2034-12-31T00:01:00-23:59", 0),
        ("2034-12-31T23:59:60Z", 0),
        ("2034-12-31T23:59:60.5Z", 500_000),
        ("2035-01-01T00:00:00.123456Z", 123_456),
        ("2035-01-01T00:00:00.123456789Z", 123_457),
        ("2035-01-01T00:00:00.999999999Z", 1_000_000),
        ("2035-01-01T00:00:00.000001+00:00", 1),
    ],
)
def test_a_time_is_kept_to_two_microseconds_and_never_earlier(
    api: HttpServer, center: TimeoutCenter, said: str, us: int
) -> None:
    made = api.post(f"{MAIL}/tasks", {"id": "one", "text": "x", "scheduleTime": said})
    assert made.status == 201, made
    [found] = center.get("one")
    exact = int(datetime(2035, 1, 1, tzinfo=timezone.utc).timestamp()) * 1_000_000 + us
    assert exact <= found.time_us <= exact + 2
    shown = api.get(f"{MAIL}/tasks/one").json["scheduleTime"]
    assert datetime.fromisoformat(shown.replace("Z", "+00:00")).microsecond == (
        found.time_us % 1_000_000
    )


@pytest.mark.parametrize(
    "said", ["1969-12-31T23:59:59.999999999Z", "0001-01-01T00:00:00+23:59", "2016-12-31T23:59:60Z"]
)
def test_a_time_before_now_means_now(api: HttpServer, said: str) -> None:
    api.post(f"{MAIL}/tasks", {"id": "one", "text": "x", "scheduleTime": said})
    assert api.get(f"{MAIL}/counts").json["ready"] == 1


@each(
    "said",
    [
        *("0000-01-01T00:00:00Z", "9999-12-31T23:59:60Z", "2256-01-01T00:00:00Z"),
        *("2035-01-01T24:00:00Z", "2035-01-01T00:00:60Z", "2035-01-01T00:00:00+24:00"),
        *("2035-01-01T00:00:00+00:60", "2035-01-01T00:00:00.Z", "2035-01-01 00:00:00Z"),
        *("2035-01-01T00:00:00.1234567891Z", "2035-01-01T00:00:00", "٢٠٣٥-01-01T00:00:00Z"),
        *(4e9, True, None),
    ],
)
def test_what_is_no_time_is_refused_and_named(api: HttpServer, said: Any) -> None:
    for path in (f"{MAIL}/tasks", f"{MAIL}/tasks/one:reschedule"):
        fields = {"id": "one", "text": "x"} if path.endswith("tasks") else {}
        reply = api.post(path, {**fields, "scheduleTime": said})
        named = (reply.status, reply.json.get("field"))
        assert named == (422, "scheduleTime") or reply.status == 404, reply
    assert api.get(f"{MAIL}/tasks/one").status == 404


# -- numbers


def test_numbers_in_json_are_kept_as_they_are(api: HttpServer, center: TimeoutCenter) -> None:
    raw = b'{"id":"one","json":[9007199254740993,-0.0,1e22,%b]}' % (b"7" * 300)
    assert api.post(f"{MAIL}/tasks", raw=raw, headers=JSON).status == 201
    kept = json.loads(center.get("one")[0].body)
    assert kept == [9007199254740993, 0.0, 1e22, int("7" * 300)]
    assert str(kept[1]) == "-0.0"


@each("raw", ["true", "1.5", "0", "-0", "1001", "9007199254740993", '"1"'])
def test_a_limit_is_a_whole_number_within_bounds(api: HttpServer, raw: str) -> None:
    reply = api.post(f"{MAIL}:lease", raw=b'{"limit":%b}' % raw.encode(), headers=JSON)
    assert (reply.status, reply.json["field"]) == (422, "limit")


@each(
    "field, value",
    [
        ("visibility", True),
        ("retryBackoff", False),
        ("deadAge", True),
        ("maxLease", True),
        ("visibility", 10**400),
        ("retryBackoff", -1),
        ("retries", 1e308),
        ("slots", 3),
        ("rate", "NaN/s"),
        ("keyRate", []),
        ("steps", [0, 0]),
        ("target", "javascript:1"),
        ("keyWeights", {"a": "b"}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_limit_that_makes_no_sense_is_named_and_changes_nothing(
    api: HttpServer, center: TimeoutCenter, field: str, value: Any
) -> None:
    beside = {"messageTtl": 1000, "deadLimit": 5, "keyConcurrency": 2}
    for method, queue in (("PUT", "rate:visibility retries"), ("PATCH", "mail")):
        if method == "PATCH" and field == "slots":
            continue  # there is no such field
        path = f"/v1/queues/{quote(queue)}"
        reply = api.ask(method, path, {**beside, field: value})
        assert (reply.status, reply.json.get("field")) == (422, field), reply
    assert center.registry.declared("rate:visibility retries") is None
    assert center.queues.describe("mail").limits["dead_limit"].source == "default"


# -- lists


def test_of_a_list_that_is_put_in_part_each_message_is_told(api: HttpServer) -> None:
    api.ask("PUT", "/v1/queues/slow", {"putRate": "5/h", "slots": 1})
    tasks = [{"id": f"m{number}", "text": "x"} for number in range(12)]
    key = {"idempotency-key": "list 7"}
    reply = api.post("/v1/queues/slow/tasks:batch", {"tasks": tasks}, headers=key)
    assert (reply.status, reply.json["type"]) == (429, "urn:celery-toc:rate-limited")
    assert int(reply.headers["retry-after"]) > 60
    assert "tasks says which" in reply.json["detail"]
    told = reply.json["tasks"]
    assert [one["id"] for one in told] == [one["id"] for one in tasks]
    put = {one["id"] for one in told if one.get("outcome") == "added"}
    refused = {one["id"] for one in told if "put_rate" in one.get("error", "")}
    assert (len(put), put | refused) == (5, {one["id"] for one in tasks})
    assert {one.id for one in api.center.scan("slow").messages} == put
    again = api.post("/v1/queues/slow/tasks:batch", {"tasks": tasks}, headers=key).json["tasks"]
    assert {one["id"] for one in again if one.get("outcome") == "repeated"} == put
    assert {one.id for one in api.center.scan("slow").messages} == put


def test_of_a_list_each_message_is_told_although_a_node_does_not_answer(
    start_cluster: Callable[..., Cluster],
) -> None:
    cluster = start_cluster()
    center = center_for(cluster.toc_url)
    with HttpServer(cluster.toc_url) as api:
        topic = center.queues.declare("mail", slots=8)
        tasks = [{"id": f"m{number}", "text": "x"} for number in range(40)]
        node_of = {one["id"]: cluster.node_of(topic.slot_for(one["id"]).body).port for one in tasks}
        home = cluster.node_of(center.keys.topics).port
        others = {*node_of.values()} - {home}
        still = next(node for node in cluster.primaries() if node.port in others)
        first = {"tasks": [{"id": f"before-{number}", "text": "x"} for number in range(40)]}
        known = api.post(f"{MAIL}/tasks:batch", first, headers={"idempotency-key": "list 6"})
        assert known.status == 201  # it knows all nodes, and they know the script
        with frozen(still):
            key = {"idempotency-key": "list 7"}
            reply = api.post(f"{MAIL}/tasks:batch", {"tasks": tasks}, headers=key)
        assert (reply.status, reply.json["type"]) == (503, "urn:celery-toc:broker")
        told = {one["id"]: one for one in reply.json["tasks"]}
        assert list(told) == [one["id"] for one in tasks]
        assert all("perhaps not" in told[id]["error"] for id in told if node_of[id] == still.port)
        put = {id for id, one in told.items() if one.get("outcome") == "added"}
        assert put
        cluster.wait_ok()
        again = api.post(f"{MAIL}/tasks:batch", {"tasks": tasks}, headers=key)
        assert again.status == 201, again
        repeated = {one["id"] for one in again.json["tasks"] if one["outcome"] == "repeated"}
        assert put <= repeated
        assert center.counts("mail").ready == 80


# -- whatever comes

PLAIN = (b"POST", b"/v1/queues/odd/tasks", b"HTTP/1.1", b"content-type", b"application/json", b"12")
PLAIN += (b'{"text":"x"}',)
ODD = (
    b"",
    b"\0",
    b"\xff",
    b" ",
    b"/",
    b"?",
    b":",
    b"*",
    b"%",
    b"%00",
    b"%ff",
    b"\r\n",
    b"-1",
    b"1e9",
)
ODD += (b"x" * 9_000, b"GET", b"PUT", b"DELETE", b"/page/queue?queue=odd", b"/v1/queues/odd:lease")
ODD += (
    b"/v1/queues?limit=0",
    b"transfer-encoding",
    b"chunked",
    b"content-length",
    b"HTTP/9.9",
    b"0",
)
ODD += (b"[]", b"null", b'{"delay":1e400}', b'{"text":0}', b'{"text":"x","key":[]}', b"[" * 12)
STATUSES = (b"HTTP/1.1 2", b"HTTP/1.1 3", b"HTTP/1.1 4")


@pytest.mark.parametrize("seed", [1, *map(night, range(2, 30))])
def test_whatever_bytes_come_they_are_answered_and_nothing_is_lost_or_grows(
    server: Server | Cluster, center: TimeoutCenter, seed: int
) -> None:
    """Requests of which one part or two are others."""
    center.put("mail", "kept", b"x", delay=3600)
    chosen = random.Random(seed)
    with HttpServer(server.toc_url) as api:
        before = peak_of(api.process.pid)
        for _ in range(400):  # what it says of them fits into a pipe
            parts = list(PLAIN)
            for place in chosen.choices(range(len(parts)), k=2):
                parts[place] = chosen.choice(ODD)
            method, path, version, name, value, length, body = parts
            head = [method + b" " + path + b" " + version, b"host: localhost", name + b": " + value]
            sent = b"\r\n".join((*head, b"content-length: " + length, b"", body))
            with socket.create_connection(("127.0.0.1", api.port), timeout=60) as raw:
                raw.sendall(sent)
                raw.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    answer = raw.recv(1 << 16)
            assert not answer or answer[:10] in STATUSES, (sent, answer)
        assert api.get("/healthz").status == 200
        assert peak_of(api.process.pid) - before < 40 << 20
        assert "Traceback" not in api.stop()
    assert center.get("kept")
