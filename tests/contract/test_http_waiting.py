"""Long polls over HTTP: many clients, one connection to the broker, in the order of asking; clients
that go away, that are slow, or that say nothing at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from kombu_toc import TimeoutCenter
from kombu_toc.http import api_for
from kombu_toc.http import serving as guard

from ..support.cluster import Cluster
from ..support.fixtures import own_server
from ..support.http_server import HttpServer
from ..support.inspection import put_some
from ..support.loops import in_loop
from ..support.servers import Server
from ..support.waiting import in_thread, wait_until

LEASE = "/v1/queues/mail:lease"


class Client:
    """One connection, in an event loop."""

    def __init__(self, api: HttpServer) -> None:
        self._api = api

    async def open(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._api.port)
        return self

    async def send(self, path: str, document: Any) -> None:
        body = json.dumps(document).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def answer(self) -> Any:
        head = await self.reader.readuntil(b"\r\n\r\n")
        [length] = [
            int(line.partition(b":")[2])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        ]
        assert head.startswith(b"HTTP/1.1 200"), head
        return json.loads(await self.reader.readexactly(length))

    def close(self) -> None:
        self.writer.close()


async def waiting(api: HttpServer, number: int, **fields: Any) -> list[Client]:
    """Clients that have asked one after the other, and wait."""
    clients = []
    for _ in range(number):
        client = await Client(api).open()
        await client.send(LEASE, {"wait": 30, **fields})
        clients.append(client)
    return clients


async def until_all_wait(client: redis.Redis, api: HttpServer) -> None:
    """Until the server has read what its clients have sent: it answers behind them."""
    probe = await Client(api).open()
    for _ in range(3):
        await probe.send("/v1/queues/mail:lease", {})
        assert (await probe.answer())["tasks"] == []
    probe.close()


def test_a_waiting_client_is_answered_when_something_is_due(api: HttpServer) -> None:
    answers: list[Any] = []
    with in_thread(lambda: answers.append(api.post(LEASE, {"wait": 30}).json["tasks"])):
        api.center.put("mail", "one", b"x", delay=0.7)
        due = time.time() + 0.7
    assert [one["id"] for one in answers[0]] == ["one"]
    assert time.time() > due - 0.05


def test_a_wait_ends_empty_after_its_time(api: HttpServer) -> None:
    began = time.monotonic()
    assert api.post(LEASE, {"wait": 0.5}).json == {"tasks": []}
    assert 0.45 <= time.monotonic() - began < 10


async def test_who_asked_first_is_served_first(api: HttpServer, center: TimeoutCenter) -> None:
    clients = []
    for _ in range(20):
        clients += await waiting(api, 1)
        await until_all_wait(center.client, api)  # of two connections, either is read first
    for number in range(20):
        center.put("mail", f"m{number}", b"x")
        [task] = (await clients[number].answer())["tasks"]
        assert task["id"] == f"m{number}"
    for client in clients:
        client.close()


async def test_each_message_goes_to_one_client_with_its_own_limit_and_visibility(
    api: HttpServer,
) -> None:
    one = (await waiting(api, 1, limit=2, visibility=100))[0]
    two = (await waiting(api, 1, limit=100, visibility=900))[0]
    three = (await waiting(api, 1, limit=5))[0]
    await until_all_wait(api.center.client, api)
    api.center.put_many("mail", [(f"m{n}", b"x") for n in range(30)])
    seen: list[str] = []
    for client, most in ((one, 2), (two, 100), (three, 5)):
        tasks = (await asyncio.wait_for(client.answer(), 20))["tasks"]
        assert 0 < len(tasks) <= most
        seen += [task["id"] for task in tasks]
        client.close()
        api.center.put_many("mail", [(f"n{len(seen)}-{n}", b"x") for n in range(9)])
    assert len(seen) == len(set(seen))
    ends = {found.id: found.time_us / 1e6 - time.time() for found in api.center.get(seen)}
    assert 50 < ends[seen[0]] <= 100
    assert 800 < ends[seen[2]] <= 900


@own_server
@pytest.mark.one_server("connections are counted at the server")
def test_a_thousand_clients_that_wait_share_one_connection_and_are_all_answered(
    server: Server, center: TimeoutCenter
) -> None:
    async def use(api: HttpServer) -> None:
        process = psutil.Process(api.process.pid)
        api.post(LEASE, {"wait": 0.1})
        before, threads = connections(center), process.num_threads()
        clients = await waiting(api, 1000)
        await until_all_wait(center.client, api)
        # At most ten carry commands; beside them there is one that blocks.
        assert connections(center) <= before + 10 + 1
        assert process.num_threads() == threads
        answers = asyncio.gather(*(client.answer() for client in clients))
        center.put_many("mail", [(f"m{n}", b"x") for n in range(1000)])
        found = await asyncio.wait_for(answers, 50)
        ids = [task["id"] for one in found for task in one["tasks"]]
        assert len(ids) == 1000 == len(set(ids))
        for client in clients:
            client.close()

    center.queues.declare("mail")
    with HttpServer(server.toc_url) as made:
        in_loop(use(made))


def connections(center: TimeoutCenter) -> int:
    return len(center.client.client_list())


@pytest.mark.parametrize("how", ["closes", "resets", "sends half", "asks more"])
async def test_what_a_client_that_went_away_waited_for_is_for_the_next_one(
    api: HttpServer, center: TimeoutCenter, how: str
) -> None:
    [gone, stays] = await waiting(api, 2)
    await until_all_wait(center.client, api)
    if how == "resets":
        raw = gone.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "sends half":
        gone.writer.write(b"POST / HTTP/1.1\r\n")
    elif how == "asks more":  # a server may stop reading behind it, and tell this one alone
        gone.writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await until_all_wait(center.client, api)
    gone.writer.transport.abort() if how == "resets" else gone.close()
    await until_all_wait(center.client, api)
    center.put("mail", "one", b"x")
    [task] = (await asyncio.wait_for(stays.answer(), 20))["tasks"]
    assert (task["id"], task["failures"]) == ("one", 0)
    stays.close()


async def test_what_is_asked_behind_a_wait_is_answered_after_it(api: HttpServer) -> None:
    [client] = await waiting(api, 1)
    await client.send("/v1/queues/mail/tasks:cancel", {"ids": ["nobody"]})
    await client.send("/v1/queues/mail:lease", {})
    await until_all_wait(api.center.client, api)
    api.center.put("mail", "one", b"x")
    [task] = (await asyncio.wait_for(client.answer(), 20))["tasks"]
    assert task["id"] == "one"
    assert (await asyncio.wait_for(client.answer(), 20))["cancelled"] == 0
    assert (await asyncio.wait_for(client.answer(), 20))["tasks"] == []
    client.close()


class Asked:
    """One request to an application of this process.

    on_send: called with each part of the answer
    """

    def __init__(self, on_send: Callable[[Any], None] = lambda message: None) -> None:
        self._on_send = on_send
        self.status = 0
        self.body = b""
        self._given = False

    async def ask(self, app: Any, path: str, document: Any, **headers: str) -> Any:
        named = [(name.replace("_", "-").encode(), said.encode()) for name, said in headers.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "client": ("127.0.0.1", 1),
            "headers": [(b"content-type", b"application/json"), *named],
        }
        body = json.dumps(document).encode()

        async def receive() -> Any:
            if self._given:
                await asyncio.Event().wait()
            self._given = True
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            self._on_send(message)
            self.status = message.get("status", self.status)
            self.body += message.get("body", b"")

        await app(scope, receive, send)
        return json.loads(self.body) if self.body else None


async def test_a_lease_that_was_given_back_is_not_repeated(
    server: Server | Cluster, center: TimeoutCenter
) -> None:
    """The receipts of its answer, which nobody got, count no more."""
    center.queues.declare("mail")
    center.put("mail", "one", b"x")

    def refuse(message: Any) -> None:
        raise OSError("the client has gone away")

    app = api_for(server.toc_url)
    await Asked(refuse).ask(app, LEASE, {}, idempotency_key="k")
    [task] = (await Asked().ask(app, LEASE, {}, idempotency_key="k"))["tasks"]
    assert (task["id"], task["failures"]) == ("one", 0)
    receipts = {"receipts": [task["receipt"]]}
    done = await Asked().ask(app, "/v1/queues/mail:ack", receipts)
    assert done == {"acknowledged": 1, "stale": []}
    await app.aclose()


async def test_what_a_server_sends_to_nobody_is_given_back(
    server: Server | Cluster, center: TimeoutCenter
) -> None:
    """A server may not tell that the client has gone away before the answer was sent."""
    center.queues.declare("mail")
    center.put("mail", "one", b"x")

    app = api_for(server.toc_url)
    connection = guard.Guarded(asyncio.Protocol())
    guard.CURRENT.set(connection)
    await Asked(lambda message: connection.lost.set()).ask(app, LEASE, {})
    await app.aclose()
    [message] = center.pop("mail").messages
    assert (message.id, message.failures) == ("one", 0)


@pytest.mark.parametrize("size", [20_000, 60_000])
def test_what_a_client_that_resets_has_not_got_is_given_back(api: HttpServer, size: int) -> None:
    put_some(api.center, "mail", 130, body=b"x" * size)
    body = b'{"limit": 1000}'
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", api.port))
        client.sendall(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (LEASE.encode(), len(body), body)
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert api.center.counts("mail").in_flight > 0
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: not api.center.counts("mail").in_flight, 10)
    assert {one.failures for one in api.center.pop("mail", 1000).messages} == {0}


async def test_what_a_client_that_resets_between_head_and_body_has_not_got_is_given_back(
    server: Server | Cluster, center: TimeoutCenter
) -> None:
    """The body meets a connection that is broken: nothing is left that has to wait."""
    center.queues.declare("mail")
    center.put("mail", "one", b"x")

    app = api_for(server.toc_url)
    client, accepted = socket.socketpair()
    transport, connection = await asyncio.get_running_loop().connect_accepted_socket(
        lambda: guard.Guarded(asyncio.Protocol()), accepted
    )
    guard.CURRENT.set(connection)

    def write(message: Any) -> None:
        transport.write(message.get("body", b"HTTP/1.1 200 OK\r\n"))
        client.close()

    await Asked(write).ask(app, LEASE, {})
    await app.aclose()
    [message] = center.pop("mail").messages
    assert (message.id, message.failures) == ("one", 0)


async def test_if_all_have_gone_away_the_message_is_there_for_others(api: HttpServer) -> None:
    for client in await waiting(api, 5):
        client.close()
    await until_all_wait(api.center.client, api)
    api.center.put("mail", "one", b"x")
    # If the pop that waited for them has brought it, it is given back at once.
    [message] = api.center.pop(["mail"], wait=20).messages
    assert (message.id, message.failures) == ("one", 0)


async def test_slow_clients_delay_nobody_and_are_cut_off(
    api: HttpServer, center: TimeoutCenter
) -> None:
    """Neither those that send headers byte by byte, nor those that send nothing."""

    slow = [await Client(api).open() for _ in range(50)]
    began = time.monotonic()
    for client in slow[:25]:
        client.writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
    for number in range(10):
        reply = await asyncio.to_thread(
            api.post, "/v1/queues/mail/tasks", {"id": f"m{number}", "text": "x"}
        )
        assert reply.status == 201

    async def dripping(client: Client) -> float:
        with contextlib.suppress(ConnectionError):
            while True:
                if client in slow[:25]:
                    client.writer.write(b"x")
                read = asyncio.ensure_future(client.reader.read(1))
                await asyncio.wait({read}, timeout=0.5)
                if read.done():
                    read.result()
                    break
                read.cancel()
        client.close()
        return time.monotonic() - began

    took = await asyncio.wait_for(asyncio.gather(*map(dripping, slow)), 40)
    assert min(took) > 5


def test_headers_without_end_are_bounded(api: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", api.port)) as raw:
        raw.settimeout(20)
        raw.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
        with contextlib.suppress(OSError):
            for number in range(20_000):
                raw.sendall(b"x-%d: %s\r\n" % (number, b"y" * 500))
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(65_536):
                pass
    assert psutil.Process(api.process.pid).memory_info().rss < 500 << 20
    assert api.get("/healthz").status == 200


def test_a_body_that_stops_half_way_harms_nobody(api: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", api.port)) as raw:
        raw.sendall(
            b"POST /v1/queues/mail/tasks HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        assert api.post("/v1/queues/mail/tasks", {"text": "x"}).status == 201


async def test_a_client_whose_machine_is_gone_keeps_a_message_until_its_lease_ends(
    api: HttpServer, center: TimeoutCenter
) -> None:
    """The connection is half open: nothing tells the server. Delivery is at least once."""

    client = (await waiting(api, 1, visibility=1))[0]
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until_all_wait(center.client, api)
    center.put("mail", "one", b"x")
    [again] = (await asyncio.to_thread(api.post, LEASE, {"wait": 30})).json["tasks"]
    assert (again["id"], again["failures"]) == ("one", 1)
    client.close()


@pytest.mark.one_server("it is stopped and continued")
def test_who_waits_is_told_when_the_broker_is_gone_and_served_when_it_is_back(
    tmp_path: Path,
) -> None:
    broker = Server(tmp_path).start()
    with HttpServer(broker.toc_url) as api:
        api.post("/v1/queues/mail/tasks", {"id": "first", "text": "x"})
        assert api.post(LEASE, {}).json["tasks"]
        broker.stop()
        reply = api.post("/v1/queues/mail/tasks", {"text": "x"})
        assert (reply.status, reply.json["type"]) == (503, "urn:celery-toc:broker")
        assert int(reply.headers["retry-after"]) >= 1
        assert api.get("/readyz").status == 503
        assert api.get("/healthz").status == 200
        broker.start()
        center = TimeoutCenter(broker.client())
        center.put("mail", "second", b"x", delay=0.5)
        assert [one["id"] for one in api.post(LEASE, {"wait": 30}).json["tasks"]] == ["second"]
    broker.stop()


async def test_a_server_that_ends_answers_who_waits_and_gives_back_what_it_holds(
    server: Server | Cluster, center: TimeoutCenter
) -> None:
    center.queues.declare("mail")

    with HttpServer(server.toc_url) as api:
        clients = await waiting(api, 30)
        await until_all_wait(center.client, api)
        began = time.monotonic()
        os.kill(api.process.pid, signal.SIGTERM)
        for client in clients:
            assert (await asyncio.wait_for(client.answer(), 20))["tasks"] == []
            client.close()
        assert await asyncio.to_thread(api.process.wait, 20) == 0
        assert time.monotonic() - began < 10
        assert api.stop() == ""
    center.put("mail", "one", b"x")
    assert [one.id for one in center.pop(["mail"], wait=10).messages] == ["one"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "program", [("kombu_toc.http",), ("celery", "-A", "endshop", "toc", "web")]
)
def test_whoever_ends_a_server_sees_nothing_of_it(
    server: Server | Cluster, tmp_path: Path, program: tuple[str, ...], how: signal.Signals
) -> None:
    tmp_path.joinpath("endshop.py").write_text(
        f"from celery import Celery\napp = Celery('endshop', broker={server.toc_url!r})\n"
    )
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    with HttpServer(
        server.toc_url, command=("-m", *program), environment={"PYTHONPATH": path}
    ) as api:
        assert api.get("/v1/queues").status == 200
        assert api.stop(how) == ""
        assert api.process.returncode == 0
