"""The notifier: real processes, and real servers that receive."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trustme
from kombu import Connection, Exchange, Queue

from kombu_toc import (
    DEAD,
    IN_FLIGHT,
    AsyncTimeoutCenter,
    Delivery,
    Found,
    Popped,
    TimeoutCenter,
    pack,
)
from kombu_toc.aio.client import Link
from kombu_toc.center.reshard import reshard_topic
from kombu_toc.notify import Notifier, new_secret
from kombu_toc.notify.targets import LEASE, Keeper, Settler

from ..support import waiting
from ..support.cases import night
from ..support.cluster import Cluster
from ..support.http_server import HttpServer
from ..support.loops import in_loop
from ..support.notifier import OK, SECRET, NotifierProcess, Received, Reply, Target, signatures
from ..support.servers import Server

Anywhere = Server | Cluster

#: A target may be tried again after many seconds.
wait_until = partial(waiting.wait_until, seconds=60)


def dead(center: TimeoutCenter, queue: str = "mail") -> list[Found]:
    return center.scan(queue, state=DEAD).messages


def held() -> tuple[threading.Event, Callable[[Received], Reply]]:
    """What lets a target answer, and how that does."""
    hold = threading.Event()

    def answer(_: Received) -> Reply:
        hold.wait(60)
        return OK

    return hold, answer


@pytest.mark.cluster
def test_a_due_message_is_sent_to_the_target_of_its_queue_and_acknowledged(
    server: Anywhere, center: TimeoutCenter
) -> None:
    """X16"""
    with Target() as target:
        center.queues.declare("mail", target=target.url)
        center.put("mail", "order-7", b'{"order": 7}', delay=0.2)
        with NotifierProcess(server.toc_url) as notifier:
            got = target.next()
            assert notifier.end() == 0
        assert (got.path, got.body) == ("/hook", b'{"order": 7}')
        assert got.headers["content-type"] == "application/json"
        assert got.headers["webhook-id"].startswith("order-7_")
        assert got.headers["toc-queue"] == "mail"
        assert signatures(got, SECRET)
        assert center.counts("mail") == (0, 0, 0, 0)


def test_messages_wait_for_their_time_and_are_sent_soon_after(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target() as target, NotifierProcess(server.toc_url) as notifier:
        center.queues.declare("mail", target=target.url)
        center.put("mail", "first", b"x")
        target.next()  # by now the queue is known
        put = time.monotonic()
        center.put("mail", "later", b"x", delay=1)
        got = target.next()
        assert got.id == "later"
        assert got.at - put >= 0.99
        assert notifier.process.poll() is None


@pytest.mark.cluster
def test_an_argument_of_a_queue_names_its_target(
    server: Anywhere, center: TimeoutCenter, connect: Callable[..., Connection]
) -> None:
    with Target() as target, NotifierProcess(server.toc_url):
        queue = Queue("mail", Exchange(""), "mail", queue_arguments={"x-target": target.url})
        connection = connect(toc_topics={"sms": {"target": f"{target.url}/sms"}})
        connection.Producer().publish({"order": 7}, routing_key="mail", declare=[queue])
        connection.Producer().publish({"order": 8}, routing_key="sms", declare=[Queue("sms")])
        some = {got.path: got for got in target.take(2)}
        assert some["/hook"].body == b'{"order": 7}'
        assert some["/hook"].headers["content-type"] == "application/json"
        assert some["/hook/sms"].body == b'{"order": 8}'


def test_a_message_may_have_a_target_of_its_own(server: Anywhere, center: TimeoutCenter) -> None:
    message = {
        "headers": {"x-target": "", "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"},
        "properties": {},
        "content-type": "text/plain",
        "content-encoding": "utf-8",
        "body": "remind",
    }
    with Target() as target, Target() as own, NotifierProcess(server.toc_url):
        center.queues.declare("mail", target=target.url)
        message["headers"]["x-target"] = own.url  # type: ignore[index]
        center.put("mail", "own", pack(message, deflate=True, id="own"))
        center.put("mail", "other", b"x")
        assert target.next().id == "other"
        got = own.next()
        assert (got.id, got.body) == ("own", b"remind")
        assert got.headers["traceparent"].startswith("00-1111")
        assert "x-target" not in got.headers


# -- failures


def test_what_fails_comes_again_by_the_back_off_of_its_queue_and_is_dead_at_last(
    server: Anywhere, center: TimeoutCenter
) -> None:
    def answer(_: Received) -> Reply:
        return 500, {}, b"out of paper " * 1000

    with Target(answer) as target, NotifierProcess(server.toc_url) as notifier:
        center.queues.declare("mail", target=target.url, retries=2, retry_backoff=0.2)
        center.put("mail", "order-7", b"remind")
        some = target.take(3)
        [found] = wait_until(lambda: dead(center))
        assert found.reason == "no retries left: HTTP 500"
        assert found.error.startswith(f"{target.url}: HTTP 500 Internal Server Error\nout of paper")
        assert len(found.error) < 700
        assert found.body == b"remind"
        assert len({got.headers["webhook-id"] for got in some}) == 1
        assert [got.headers["toc-failures"] for got in some] == ["0", "1", "2"]
        assert some[1].at - some[0].at >= 0.19
        assert some[2].at - some[1].at >= 0.39
        assert "does not take messages" in notifier.wait_for("queue mail")


@pytest.mark.cluster
def test_without_a_back_off_of_its_queue_that_of_the_notifier_holds(
    server: Anywhere, center: TimeoutCenter
) -> None:
    answers = [(500, {}, b""), OK]
    with (
        Target(lambda _: answers.pop(0)) as target,  # type: ignore[arg-type, return-value]
        NotifierProcess(server.toc_url, "--backoff", "0.5"),
    ):
        center.queues.declare("mail", target=target.url)
        center.put("mail", "order-7", b"remind")
        first, second = target.take(2)
        assert second.at - first.at >= 0.49


def test_while_a_target_wants_to_be_left_alone_it_gets_nothing_that_is_put(
    server: Anywhere, center: TimeoutCenter
) -> None:
    """Nor what a fetch brings that was waiting by then."""
    answers: list[Reply] = [(429, {"retry-after": "2"}, b""), OK, OK]
    with Target(lambda _: answers.pop(0)) as target, NotifierProcess(server.toc_url) as notifier:
        center.queues.declare("mail", target=target.url)
        center.put("mail", "first", b"x")
        first = target.next()
        notifier.wait_for("does not take messages")
        center.put("mail", "second", b"x")
        some = target.take(2)
        assert {got.id for got in some} == {"first", "second"}
        assert min(got.at for got in some) - first.at >= 1.9
        assert {got.headers["toc-failures"] for got in some if got.id == "second"} == {"0"}


@pytest.mark.parametrize("status", [429, 503])
def test_a_target_that_says_when_to_come_again_is_left_alone_until_then(
    server: Anywhere, center: TimeoutCenter, status: int
) -> None:
    said = threading.Event()

    def answer(got: Received) -> Reply:
        if said.is_set():
            return OK
        said.set()
        return status, {"retry-after": "2"}, b""

    with Target(answer) as target, NotifierProcess(server.toc_url, "--concurrency", "1"):
        center.queues.declare("mail", target=target.url, retry_backoff=0.01)
        center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(5)])
        some = target.take(6)
        assert some[1].at - some[0].at >= 1.9
        assert len({got.id for got in some}) == 5
        wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))


@pytest.mark.cluster
def test_410_stops_the_target_until_somebody_names_one_again(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target(lambda _: (410, {}, b"moved away")) as gone, Target() as target:
        center.queues.declare("mail", target=gone.url, retries=3)
        center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(300)])
        with NotifierProcess(server.toc_url, "--concurrency", "4") as notifier:
            line = notifier.wait_for("410 Gone")
            assert "celery toc topic set mail --target URL" in line
            wait_until(lambda: center.counts("mail") == (300, 0, 0, 0))
            described = center.queues.describe("mail")
            assert described.limits["target"].value == gone.url
            assert (described.target_stopped or "").startswith("HTTP 410 at 20")
            assert gone.received.qsize() <= 8
            center.queues.alter("mail", retries=4)  # leaves it stopped
            assert center.queues.describe("mail").target_stopped
            center.queues.alter("mail", target=target.url)
            assert center.queues.describe("mail").target_stopped is None
            assert len({got.id for got in target.take(300)}) == 300
            assert "0" in {got.headers["toc-failures"] for got in gone.received.queue}
        assert center.counts("mail") == (0, 0, 0, 0)


def test_410_of_a_messages_own_target_ends_that_message_only(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target(lambda _: (410, {}, b"")) as gone, Target() as target:
        message: dict[str, Any] = {"headers": {"x-target": gone.url}, "body": b"x"}
        center.queues.declare("mail", target=target.url)
        center.put("mail", "own", pack(message, deflate=False))
        with NotifierProcess(server.toc_url):
            [found] = wait_until(lambda: dead(center))
            assert (found.id, found.reason) == ("own", "HTTP 410")
            center.put("mail", "other", b"x")
            assert target.next().id == "other"
        assert center.queues.describe("mail").target_stopped is None


def test_redirects_are_not_followed(server: Anywhere, center: TimeoutCenter) -> None:
    with Target() as other:
        with (
            Target(lambda _: (307, {"location": other.url}, b"")) as target,
            NotifierProcess(server.toc_url),
        ):
            center.queues.declare("mail", target=target.url, retries=0)
            center.put("mail", "order-7", b"remind")
            [found] = wait_until(lambda: dead(center))
        assert "HTTP 307 (redirects are not followed)" in found.error
        assert other.connections == 0


def test_nobody_there_and_no_such_name_are_failures_that_say_so(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target() as target:
        nobody = target.url
    center.queues.declare("mail", target=nobody, retries=0)
    center.queues.declare("sms", target="https://nowhere.invalid/", retries=0)
    for queue in ("mail", "sms"):
        center.put(queue, "order-7", b"remind")
    with NotifierProcess(server.toc_url):
        [found] = wait_until(lambda: dead(center))
        assert "onnect" in found.error
        [found] = wait_until(lambda: dead(center, "sms"))
        assert "its name cannot be resolved" in found.error


def test_what_answers_too_slowly_or_without_end_holds_nothing_up(
    server: Anywhere, center: TimeoutCenter
) -> None:
    """One never answers; one sends a byte now and then; one sends without end, and has taken it."""
    ended = threading.Event()

    def never(_: Received) -> Reply:
        ended.wait(60)
        return OK

    def drip(listening: socket.socket, head: bytes, piece: bytes, pause: float) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    connection.sendall(head)
                    while not ended.wait(pause):
                        connection.sendall(piece)
                except OSError:
                    pass

    head = b"HTTP/1.1 %d X\r\ncontent-length: 1000000000000\r\n\r\n"
    with (
        Target(never) as silent,
        socket.create_server(("127.0.0.1", 0)) as slow,
        socket.create_server(("127.0.0.1", 0)) as endless,
    ):
        for one, status, piece, pause in ((slow, 500, b"x", 0.1), (endless, 200, b"x" * 65536, 0)):
            threading.Thread(
                target=drip, args=(one, head % status, piece, pause), daemon=True
            ).start()
        urls = {
            "silent": silent.url,
            "slow": f"http://127.0.0.1:{slow.getsockname()[1]}/",
            "endless": f"http://127.0.0.1:{endless.getsockname()[1]}/",
        }
        for queue, url in urls.items():
            center.queues.declare(queue, target=url, retries=0)
            center.put(queue, "order-7", b"remind")
        with NotifierProcess(server.toc_url, "--timeout", "1"):
            [found] = wait_until(lambda: dead(center, "silent"))
            assert "no answer within 1 seconds" in found.error
            [found] = wait_until(lambda: dead(center, "slow"))
            assert found.reason == "no retries left: HTTP 500"
            assert found.error.startswith(f"{urls['slow']}: HTTP 500 X\nxxx")
            wait_until(lambda: center.counts("endless") == (0, 0, 0, 0))
        ended.set()
        for one in (slow, endless):
            one.shutdown(socket.SHUT_RDWR)


# -- where it sends to


def test_addresses_that_are_not_public_are_refused_unless_they_are_allowed(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target() as target:
        urls = [
            f"http://127.0.0.1:{target.port}/",
            f"https://127.0.0.1:{target.port}/",
            f"https://localhost:{target.port}/",
            f"https://[::ffff:127.0.0.1]:{target.port}/",
            f"https://2130706433:{target.port}/",
            f"https://0x7f.1:{target.port}/",
            f"https://0.0.0.0:{target.port}/",
            "http://169.254.169.254/latest/meta-data/",
        ]
        for number, url in enumerate(urls):
            center.queues.declare(f"mail-{number}", target=url, retries=0)
            center.put(f"mail-{number}", "order-7", b"remind")
        with NotifierProcess(server.toc_url, allow=""):
            for number in range(len(urls)):
                [found] = wait_until(lambda number=number: dead(center, f"mail-{number}"))
                # aiohttp refuses numbers itself, or asks the system, or hands them on.
                refused = "is no(t a canonical IPv4| public)? address"
                assert re.search(refused, found.error), (urls[number], found.error)
        assert target.connections == 0


def test_an_address_may_be_allowed_at_one_port_only(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target() as target, Target() as other:
        center.queues.declare("mail", target=target.url)
        center.queues.declare("sms", target=other.url, retries=0)
        for queue in ("mail", "sms"):
            center.put(queue, "order-7", b"remind")
        with NotifierProcess(server.toc_url, allow=f"127.0.0.0/8:{target.port}"):
            assert target.next().id == "order-7"
            [found] = wait_until(lambda: dead(center, "sms"))
        assert f"--allow 127.0.0.1:{other.port} lets it be a target" in found.error
        assert other.connections == 0


def test_a_target_is_compared_and_sent_in_its_one_form(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target() as target:
        base = f"http://127.0.0.1:{target.port}"
        secrets = f"{base}/hooks/* {SECRET}"
        for number, path in enumerate(("/hooks/../admin", "/hooks/%2E%2e/admin", "/hooks/a/../..")):
            center.queues.declare(f"bad-{number}", target=base + path)
            center.put(f"bad-{number}", "order-7", b"remind")
        for number, path in enumerate(("/%68ooks/a?x=%7e", "/./hooks//b/c/../d", "/hooks/%2fa")):
            center.queues.declare(f"good-{number}", target=f"HTTP://127.0.0.1:{target.port}{path}")
            center.put(f"good-{number}", "order-8", b"remind")
        with NotifierProcess(server.toc_url, secrets=secrets) as notifier:
            got = target.take(3)
            for _ in range(3):
                assert "bad-" in notifier.wait_for("there is no secret for its target")
        assert {one.path for one in got} == {"/hooks/a?x=~", "/hooks//b/d", "/hooks/%2Fa"}
        assert all(signatures(one, SECRET) for one in got)
        assert target.received.empty()


def test_no_name_makes_a_line_of_its_own_in_the_log(
    server: Anywhere, center: TimeoutCenter
) -> None:
    forged = "mail\n2026-01-31 ERROR all is lost \x1b[2J\u202e"
    with Target(lambda _: (500, {}, "\x1b[2Jx\u2028y".encode())) as target:
        center.queues.declare(forged, target=target.url)
        center.queues.declare(f"other {forged}", target="https://shop.example.com/hook")
        center.put(forged, "order-7", b"remind")
        with NotifierProcess(server.toc_url, secrets=f"{target.url} {SECRET}") as notifier:
            notifier.wait_for("there is no secret")
            notifier.wait_for("does not take messages")
            notifier.end()
            said = [line for line in notifier.said if "mail" in line]
    assert len(said) == 2
    for line in said:
        assert line.isprintable() and line[:2] == "20"
        assert "mail\\n2026-01-31 ERROR all is lost \\x1b[2J\\u202e" in line


def test_https_is_spoken_with_those_whose_certificate_is_trusted(
    server: Anywhere, center: TimeoutCenter, tmp_path: Path
) -> None:
    ca, other = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")

    def context(of: trustme.CA, name: str) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        of.issue_cert(name).configure_cert(made)
        return made

    with (
        Target(context=context(ca, "127.0.0.1")) as target,
        Target(context=context(ca, "shop.example.com")) as misnamed,
        Target(context=context(other, "127.0.0.1")) as unknown,
        NotifierProcess(server.toc_url, environment={"SSL_CERT_FILE": str(tmp_path / "ca.pem")}),
    ):
        for queue, one in (("mail", target), ("misnamed", misnamed), ("unknown", unknown)):
            center.queues.declare(queue, target=one.url, retries=0)
            center.put(queue, "order-7", b"remind")
        assert signatures(target.next())
        for queue in ("misnamed", "unknown"):
            [found] = wait_until(lambda queue=queue: dead(center, queue))
            assert "certificate" in found.error
        assert misnamed.received.empty() and unknown.received.empty()


# -- secrets


def test_a_secret_is_replaced_while_the_notifier_runs(
    server: Anywhere, center: TimeoutCenter, tmp_path: Path
) -> None:
    path, new = tmp_path / "secrets.txt", new_secret()
    path.write_text(f"* {SECRET}\n")
    with (
        Target() as target,
        NotifierProcess(server.toc_url, "--secrets", str(path), secrets="") as notifier,
    ):
        center.queues.declare("mail", target=target.url)
        sent = iter(range(10_000))

        def send() -> Received:
            center.put("mail", f"order-{next(sent)}", b"x")
            time.sleep(0.05)  # it looks into the file now and then
            return target.next()

        got = send()
        assert signatures(got, SECRET) and not signatures(got, new)
        path.write_text(f"* {new} {SECRET}\n")
        wait_until(lambda: signatures(send(), new))
        got = send()
        assert signatures(got, SECRET) and signatures(got, new)
        path.write_text("* nonsense\n")
        notifier.wait_for("the secrets stay as they were")
        assert signatures(send(), new)
        path.write_text(f"* {new}\n")
        wait_until(lambda: not signatures(send(), SECRET))
        assert signatures(send(), new)
        notifier.end()
        assert not any(SECRET in line or new in line for line in notifier.said)


def test_a_target_without_a_secret_gets_nothing_until_it_has_one(
    server: Anywhere, center: TimeoutCenter, tmp_path: Path
) -> None:
    path = tmp_path / "secrets.txt"
    path.write_text(f"https://shop.example.com {SECRET}\n")
    with Target() as target:
        center.queues.declare("mail", target=f"{target.url}?key=sesame")
        center.put("mail", "order-7", b"remind")
        with NotifierProcess(server.toc_url, "--secrets", str(path), secrets="") as notifier:
            line = notifier.wait_for("there is no secret for its target")
            assert target.url in line and "sesame" not in line
            assert center.counts("mail") == (1, 0, 0, 0)
            path.write_text(f"http://127.0.0.1:{target.port} {SECRET}\n")
            assert signatures(target.next())
            assert target.received.empty()


def test_who_wants_no_signatures_has_to_say_so(server: Anywhere, center: TimeoutCenter) -> None:
    with pytest.raises(AssertionError, match="there are no secrets, so nothing could be signed"):
        NotifierProcess(server.toc_url, secrets="")
    with Target() as target, NotifierProcess(server.toc_url, secrets=None) as notifier:
        center.queues.declare("mail", target=target.url)
        center.put("mail", "order-7", b"remind")
        assert "webhook-signature" not in target.next().headers
        assert any("Nothing is signed" in line for line in notifier.said)


# -- many of them


@pytest.mark.cluster
def test_several_share_the_work_and_each_message_is_sent_once(
    server: Anywhere, center: TimeoutCenter
) -> None:
    secrets = [new_secret() for _ in range(3)]
    both = threading.Barrier(3)

    def answer(got: Received) -> Reply:
        if got.id.startswith("first"):
            both.wait(60)  # only if each has one of these under way does this end
        return OK

    with Target(answer) as target:
        center.queues.declare("mail", target=target.url)
        processes = [
            NotifierProcess(server.toc_url, "--concurrency", "1", secrets=f"* {secret}")
            for secret in secrets
        ]
        try:
            center.put_many("mail", [{"id": f"first-{n}", "body": b"x"} for n in range(3)])
            center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(60)])
            some = target.take(63)
            wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))
        finally:
            assert [one.end() for one in processes] == [0, 0, 0]
        assert target.received.empty()
        assert len({got.id for got in some}) == 63
        signed = {secret for got in some for secret in secrets if signatures(got, secret)}
        assert signed == set(secrets)


@pytest.mark.cluster
def test_a_notifier_is_among_the_consumers_of_the_queues_that_it_sends(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target() as target, NotifierProcess(server.toc_url) as notifier:
        pid = notifier.process.pid
        for queue in ("mail", "sms"):
            center.queues.declare(queue, target=target.url)
        wait_until(lambda: set(center.queues.consumers()) == {"mail", "sms"})
        assert [one.pid for one in center.queues.consumers()["mail"]] == [pid]
        center.queues.alter("sms", target=None)
        wait_until(lambda: set(center.queues.consumers()) == {"mail"})
        notifier.end()
        assert center.queues.consumers() == {}


def test_one_that_is_killed_loses_nothing(server: Anywhere, center: TimeoutCenter) -> None:
    """It is killed with requests under way; the other one sends these again."""
    hold, answer = held()

    with Target(answer) as target:
        center.queues.declare("mail", target=target.url)
        center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(200)])
        with NotifierProcess(server.toc_url, "--timeout", "2", "--concurrency", "20") as killed:
            first = {got.id for got in target.take(20)}
            assert killed.end(signal.SIGKILL) == -signal.SIGKILL
            hold.set()
        assert center.counts("mail").in_flight == 20
        with NotifierProcess(server.toc_url, "--timeout", "2"):
            wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))
        second = [target.received.get() for _ in range(target.received.qsize())]
        assert len(second) == 200
        assert {got.id for got in second} == {f"order-{n}" for n in range(200)}
        again = {got.id for got in second if got.headers["toc-failures"] == "1"}
        assert again == first


def test_leases_are_short_however_long_a_request_may_take_and_renewed_meanwhile(
    server: Anywhere, center: TimeoutCenter
) -> None:
    """So what a killed one had under way comes again soon."""
    hold, answer = held()

    def left() -> float:
        """Seconds until its lease ends."""
        [found] = center.get("order-7", topic="mail")
        assert found.state == IN_FLIGHT
        return found.time_us / 1e6 - time.time()

    with Target(answer) as target, NotifierProcess(server.toc_url, "--timeout", "3600"):
        center.queues.declare("mail", target=target.url)
        center.put("mail", "order-7", b"remind")
        target.next()
        first = left()
        assert first <= LEASE + 1
        wait_until(lambda: left() < first - 1)
        before = left()
        wait_until(lambda: left() > before)
        hold.set()
        wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))
        assert target.received.empty()


def test_one_that_stood_still_sends_nothing_that_another_one_has(
    server: Anywhere, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still when it has fetched a message, until its lease has ended."""
    theirs: list[Delivery] = []

    async def exchange(self: Link, *args: Any, real: Any = Link.exchange) -> Any:
        replies = await real(self, *args)
        if not theirs and center.counts("mail").in_flight:
            theirs.extend(wait_until(lambda: center.pop("mail", visibility=60).messages))
        return replies

    async def run() -> None:
        done = asyncio.Event()
        async with AsyncTimeoutCenter.from_url(server.toc_url) as toc:
            notifier = Notifier(toc, None, allow=["127.0.0.1"])
            running = asyncio.create_task(notifier.run(done))
            center.put("mail", "order-7", b"remind")
            await asyncio.to_thread(wait_until, lambda: theirs)
            await toc.put("mail", "order-8", b"remind")
            assert (await asyncio.to_thread(target.next)).id == "order-8"
            done.set()
            await running

    monkeypatch.setattr("kombu_toc.notify.targets.LEASE", 1.0)
    monkeypatch.setattr(Link, "exchange", exchange)
    with Target() as target:
        center.queues.declare("mail", target=target.url)
        in_loop(run())
        assert target.received.empty()
        assert [message.id for message in theirs] == ["order-7"]
        assert center.ack(theirs) == 1
        assert center.counts("mail") == (0, 0, 0, 0)


def test_what_was_answered_while_one_stood_still_is_not_sent_again(
    server: Anywhere, center: TimeoutCenter
) -> None:
    """Although the time of the requests is over by then."""
    hold, seconds = threading.Event(), 5

    def answer(_: Received) -> Reply:
        hold.wait(60)
        return OK

    with Target(answer) as target, NotifierProcess(server.toc_url, f"--timeout={seconds}") as one:
        center.queues.declare("mail", target=target.url)
        center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(3)])
        last = target.take(3)[-1]
        with one.standing_still():
            hold.set()
            for _ in range(3):
                target.answered.get(timeout=30)
            wait_until(lambda: time.monotonic() > last.at + seconds)
        wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))
        assert target.received.empty()


@pytest.mark.parametrize("limits", [{}, night({"concurrency": 20})], ids=["any", "limited"])
def test_what_one_has_under_way_it_does_not_send_again_although_its_leases_have_ended(
    server: Anywhere, center: TimeoutCenter, limits: dict[str, Any]
) -> None:
    """Others have rolled it back while it stood still, and it is the one that fetches it again."""
    hold, answer = held()

    def all_are_back() -> bool:
        center.release(center.pop("mail", 1).messages)
        return center.counts("mail").ready == 10

    short = "from kombu_toc.notify import __main__, targets; targets.LEASE = 2; __main__.main()"
    command = ("-c", short)
    with Target(answer) as target, NotifierProcess(server.toc_url, command=command) as one:
        center.queues.declare("mail", target=target.url, **limits)
        center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(10)])
        target.take(10)
        with one.standing_still():
            wait_until(all_are_back)
        wait_until(lambda: center.counts("mail").in_flight == 10)
        hold.set()
        wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))
        assert target.received.empty()


def test_what_one_had_fetched_again_before_it_was_acknowledged_is_not_sent_again(
    server: Anywhere, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of that only when the message is done. Where places are limited, the message still
    holds one."""
    hold, fetched, acked = threading.Event(), threading.Event(), asyncio.Event()

    def answer(_: Received) -> Reply:
        hold.wait(60)
        return OK

    def is_fetched_again() -> bool:
        center.release(center.pop("mail", 1).messages)
        return fetched.is_set()

    async def pop(self: Notifier, *args: Any, real: Any = Notifier.pop) -> Popped:
        popped: Popped = await real(self, *args)
        if any(message.failures for message in popped.messages):
            fetched.set()
            await acked.wait()
        return popped

    async def ack(self: Settler, message: Delivery, real: Any = Settler.ack) -> None:
        await real(self, message)
        acked.set()

    async def run() -> None:
        done = asyncio.Event()
        async with AsyncTimeoutCenter.from_url(server.toc_url) as toc:
            notifier = Notifier(toc, None, allow=["127.0.0.1"])
            running = asyncio.create_task(notifier.run(done))
            await asyncio.to_thread(target.next)
            await asyncio.to_thread(wait_until, is_fetched_again)
            hold.set()
            await asyncio.to_thread(wait_until, lambda: center.counts("mail") == (0, 0, 0, 0))
            done.set()
            await running

    monkeypatch.setattr("kombu_toc.notify.targets.LEASE", 1.0)
    monkeypatch.setattr(Keeper, "run", lambda _: asyncio.sleep(600))  # it renews nothing
    monkeypatch.setattr(Keeper, "is_unsure", lambda _: True)
    monkeypatch.setattr(Keeper, "unsure_for", 60)
    monkeypatch.setattr(Notifier, "pop", pop)
    monkeypatch.setattr(Settler, "ack", ack)
    with Target(answer) as target:
        center.queues.declare("mail", target=target.url, concurrency=5)
        center.put("mail", "order-7", b"remind")
        in_loop(run())
        assert target.received.empty()


def test_one_that_is_told_to_end_ends_what_is_under_way(
    server: Anywhere, center: TimeoutCenter
) -> None:
    begun, hold = threading.Event(), threading.Event()

    def answer(_: Received) -> Reply:
        begun.set()
        hold.wait(60)
        return OK

    with Target(answer) as target:
        center.queues.declare("mail", target=target.url)
        center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(5)])
        with NotifierProcess(server.toc_url, "--concurrency", "2") as notifier:
            target.take(2)
            assert begun.is_set()
            notifier.process.send_signal(signal.SIGTERM)
            # Nothing tells that it has got the signal: what has ended would be fetched for.
            wait_until(lambda: not _is_caught(notifier, signal.SIGTERM))
            hold.set()
            assert notifier.process.wait(60) == 0
        assert center.counts("mail") == (3, 0, 0, 0)
        assert target.received.empty()


def _is_caught(notifier: NotifierProcess, one: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: it takes it away with the first."""
    status = Path(f"/proc/{notifier.process.pid}/status").read_text()
    [caught] = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (one - 1) & 1)


def test_one_slow_target_does_not_delay_others(server: Anywhere, center: TimeoutCenter) -> None:
    """Also if there are so many queues that one pop waits for several."""
    hold, answer = held()

    with Target(answer) as slow, Target() as fast:
        queues = [f"fast-{n}" for n in range(60)]
        center.queues.declare("slow", target=slow.url)
        for queue in queues:
            center.queues.declare(queue, target=fast.url, slots=1)
        center.put_many("slow", [{"id": f"order-{n}", "body": b"x"} for n in range(100)])
        with NotifierProcess(server.toc_url, "--concurrency", "10"):
            slow.take(10)  # it has all that it may have
            for round_ in range(2):
                for queue in queues:
                    center.put(queue, f"order-{round_}", b"x")
                assert len({got.headers["toc-queue"] for got in fast.take(60)}) == 60
            assert slow.received.empty()
            hold.set()
            slow.take(90)
            wait_until(lambda: center.counts("slow") == (0, 0, 0, 0))


def test_a_slow_target_of_single_messages_does_not_delay_the_others_of_its_queue(
    server: Anywhere, center: TimeoutCenter
) -> None:
    hold, answer = held()

    def to(target: Target, name: str, number: int) -> list[dict[str, Any]]:
        body = pack({"headers": {"x-target": target.url}, "body": b"x"}, deflate=False)
        return [{"id": f"{name}-{n}", "body": body} for n in range(number)]

    with Target(answer) as slow, Target() as fast, Target() as usual:
        center.queues.declare("mail", target=usual.url)
        center.put_many("mail", to(slow, "slow", 100))
        with NotifierProcess(server.toc_url, "--concurrency", "8") as notifier:
            slow.take(2)
            center.put_many("mail", to(fast, "fast", 30))
            center.put("mail", "order-7", b"x")
            assert {got.id for got in fast.take(30)} == {f"fast-{n}" for n in range(30)}
            assert usual.next().id == "order-7"
            assert slow.received.empty()
            notifier.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not _is_caught(notifier, signal.SIGTERM))
            # What waits for its host is given back.
            wait_until(lambda: center.counts("mail").in_flight == 2)
            hold.set()
            assert notifier.process.wait(60) == 0
        assert center.counts("mail") == (98, 0, 0, 0)
        with NotifierProcess(server.toc_url, "--concurrency", "8"):
            assert len({got.id for got in slow.take(98)}) == 98
            wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))


class Meter:
    """Answers after a moment; notes how many it answered at a time, at most."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()

    def __call__(self, _: Received) -> Reply:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.05)  # as long as a target takes
        with self._lock:
            self._now -= 1
        return OK


@pytest.mark.cluster
def test_the_limits_of_a_queue_are_those_of_its_target(
    server: Anywhere, center: TimeoutCenter
) -> None:
    answer = Meter()
    with Target(answer) as target:
        center.queues.declare("mail", target=target.url, concurrency=3)
        center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(30)])
        with NotifierProcess(server.toc_url), NotifierProcess(server.toc_url):
            assert len({got.id for got in target.take(30)}) == 30
            wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))
        assert answer.most == 3
    with Target() as target:
        center.queues.declare("calls", target=target.url, rate="20/s")
        center.put_many("calls", [{"id": f"call-{n}", "body": b"x"} for n in range(9)])
        with NotifierProcess(server.toc_url):
            some = target.take(9)
        assert some[-1].at - some[0].at >= 0.35


def test_what_a_rate_lets_start_in_a_moment_is_fetched_together(
    server: Anywhere, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the rate is used up, although each fetch takes a while; and nothing is sent early."""
    fetched: list[Popped] = []

    def start(self: Notifier, popped: Popped, lanes: Any, real: Any = Notifier.start) -> None:
        fetched.append(popped)
        real(self, popped, lanes)

    async def run() -> None:
        done = asyncio.Event()
        async with AsyncTimeoutCenter.from_url(server.toc_url) as toc:
            notifier = Notifier(toc, None, allow=["127.0.0.1"])
            running = asyncio.create_task(notifier.run(done))
            some.extend(await asyncio.to_thread(target.take, 18))
            done.set()
            await running

    monkeypatch.setattr("kombu_toc.notify.notifier.AHEAD", 0.9)
    monkeypatch.setattr(Notifier, "start", start)
    some: list[Received] = []
    with Target() as target:
        center.queues.declare("calls", target=target.url, rate="20/s")
        center.put_many("calls", [{"id": f"call-{n}", "body": b"x"} for n in range(18)])
        in_loop(run())
    assert max(len(popped.messages) for popped in fetched) >= 17
    starts = sorted(one.start_us or popped.now_us for popped in fetched for one in popped.messages)
    assert len(starts) == 18
    assert min(b - a for a, b in pairwise(starts)) >= 50_000
    assert some[-1].at - some[0].at >= 0.8
    assert center.counts("calls") == (0, 0, 0, 0)


def test_messages_of_a_serial_key_come_one_after_the_other_also_if_one_fails(
    server: Anywhere, center: TimeoutCenter
) -> None:
    failed = threading.Event()

    def answer(got: Received) -> Reply:
        if got.id == "anna-3" and not failed.is_set():
            failed.set()
            return 500, {}, b""
        return OK

    with Target(answer) as target:
        center.queues.declare("mail", target=target.url, key_order="serial", retry_backoff=0.1)
        for number in range(8):
            center.put("mail", f"anna-{number}", b"x", key="anna")
        with NotifierProcess(server.toc_url), NotifierProcess(server.toc_url):
            some = [got.id for got in target.take(9)]
        assert some == [f"anna-{number}" for number in (0, 1, 2, 3, 3, 4, 5, 6, 7)]


def test_a_later_message_of_the_same_id_has_another_webhook_id_and_a_requeued_one_its_own(
    server: Anywhere, center: TimeoutCenter
) -> None:
    answers: list[Reply] = [OK, (500, {}, b""), OK]
    with Target(lambda _: answers.pop(0)) as target, NotifierProcess(server.toc_url):
        center.queues.declare("mail", target=target.url, retries=0)
        center.put("mail", "order-7", b"remind")
        first = target.next()
        wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))
        center.put("mail", "order-7", b"remind")
        second = target.next()
        wait_until(lambda: dead(center))
        center.dead.requeue("mail")
        third = target.next()
        assert {got.id for got in (first, second, third)} == {"order-7"}
        assert first.headers["webhook-id"] != second.headers["webhook-id"]
        assert second.headers["webhook-id"] == third.headers["webhook-id"]


@pytest.mark.one_server("messages are not moved from node to node")
def test_a_message_keeps_its_webhook_id_when_its_queue_is_resharded(
    server: Anywhere, center: TimeoutCenter
) -> None:
    """Between attempts, more than once, and as a dead letter."""
    taken = threading.Event()

    def answer(_: Received) -> Reply:
        return OK if taken.is_set() else (500, {}, b"")

    with Target(answer) as target:
        center.queues.declare("mail", target=target.url, slots=2, retries=2, retry_backoff=1)
        center.put_many("mail", [{"id": f"order-{n}", "body": b"x"} for n in range(24)])
        some: list[list[Received]] = []
        for slots in (2, 8, 1):
            reshard_topic(center, "mail", slots, settle=0.0)
            with NotifierProcess(server.toc_url):
                some.append(target.take(24))
                if slots == 1:
                    wait_until(lambda: center.counts("mail") == (0, 0, 0, 24))
                else:
                    wait_until(lambda: center.counts("mail").in_flight == 0)
        reshard_topic(center, "mail", 4, settle=0.0)
        taken.set()
        center.dead.requeue("mail")
        with NotifierProcess(server.toc_url):
            some.append(target.take(24))
        ids = [{got.id: got.headers["webhook-id"] for got in one} for one in some]
        assert len(set(ids[0].values())) == 24
        assert ids == [ids[0]] * 4


@pytest.mark.cluster
def test_messages_that_share_an_id_have_webhook_ids_of_their_own(
    server: Anywhere, center: TimeoutCenter
) -> None:
    """Their keys put them into several slots, and one pop fetches them."""
    with Target() as target:
        center.queues.declare("mail", target=target.url, slots=16)
        for number in range(8):
            center.put("mail", "order-7", b"remind", key=f"customer-{number}")
        with NotifierProcess(server.toc_url):
            some = target.take(8)
        assert len({got.headers["webhook-id"] for got in some}) == 8


def test_a_message_that_is_cancelled_while_it_is_sent_holds_nothing_up(
    server: Anywhere, center: TimeoutCenter
) -> None:
    hold = threading.Event()

    def answer(got: Received) -> Reply:
        if got.id == "order-7":
            hold.wait(60)
        return (500, {}, b"") if got.id == "order-7" else OK

    with Target(answer) as target, NotifierProcess(server.toc_url, "--concurrency", "1"):
        center.queues.declare("mail", target=target.url)
        center.put("mail", "order-7", b"remind")
        target.next()
        center.cancel("order-7", in_flight=True)
        hold.set()
        center.put("mail", "order-8", b"remind")
        assert target.next().id == "order-8"
        wait_until(lambda: center.counts("mail") == (0, 0, 0, 0))


def test_a_message_of_megabytes_is_sent_whole(server: Anywhere, center: TimeoutCenter) -> None:
    body = b"0123456789" * 1_000_000
    with Target() as target, NotifierProcess(server.toc_url):
        center.queues.declare("mail", target=target.url)
        center.put_many("mail", [{"id": f"order-{n}", "body": body} for n in range(4)])
        some = target.take(4)
        assert {got.id for got in some} == {f"order-{n}" for n in range(4)}
        assert all(got.body == body and signatures(got) for got in some)


def test_messages_that_are_small_while_they_wait_do_not_fill_the_memory(
    server: Anywhere, center: TimeoutCenter
) -> None:
    answer = Meter()
    body = b"0" * (15 << 20)
    message = pack({"headers": {}, "content-type": "text/plain", "body": body}, deflate=True)
    assert len(message) < 20_000
    with Target(answer) as target, NotifierProcess(server.toc_url):
        center.queues.declare("mail", target=target.url)
        center.put_many("mail", [{"id": f"order-{n}", "body": message} for n in range(12)])
        some = target.take(12)
        assert {got.id for got in some} == {f"order-{n}" for n in range(12)}
        assert all(len(got.body) == 15 << 20 for got in some)
        assert answer.most <= 3  # 32 MiB, and the one that goes beyond


@pytest.mark.cluster
def test_a_paused_queue_is_not_sent_until_it_is_resumed(
    server: Anywhere, center: TimeoutCenter
) -> None:
    with Target() as target:
        for queue in ("mail", "sms"):
            center.queues.declare(queue, target=target.url)
            center.put(queue, f"{queue}-7", b"remind")
        center.queues.pause("mail")
        with NotifierProcess(server.toc_url):
            assert target.next().id == "sms-7"
            assert center.counts("mail") == (1, 0, 0, 0)
            center.queues.resume("mail")
            assert target.next().id == "mail-7"


def test_it_goes_on_when_the_broker_is_back(tmp_path: Path) -> None:
    server = Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always").start()
    try:
        with Target() as target, server.client() as client:
            center = TimeoutCenter(client, grace=0)
            center.queues.declare("mail", target=target.url)
            center.put("mail", "order-1", b"x")
            with NotifierProcess(server.toc_url) as notifier:
                assert target.next().id == "order-1"
                server.kill()
                notifier.wait_for("cannot ")
                server.start()
                center.put("mail", "order-2", b"x")
                while target.next().id != "order-2":  # order-1 may be sent again
                    pass
                assert notifier.end() == 0
    finally:
        server.stop()


@pytest.mark.cluster
def test_a_server_of_the_http_api_may_send_too(
    server: Anywhere, center: TimeoutCenter, tmp_path: Path
) -> None:
    path = tmp_path / "secrets.txt"
    path.write_text(f"* {SECRET}\n")
    options = ("--notify", str(path), "--notify-allow", "127.0.0.1")
    with Target() as target, HttpServer(server.toc_url, *options) as api:
        reply = api.ask("PUT", "/v1/queues/mail", {"target": target.url})
        assert reply.json["limits"]["target"] == {"value": target.url, "source": "declared"}
        api.post("/v1/queues/mail/tasks", {"id": "order-7", "json": {"order": 7}})
        got = target.next()
        assert (got.id, got.body) == ("order-7", b'{"order":7}')
        assert signatures(got)
        api.post("/v1/queues/mail/tasks", {"text": "a,b", "contentType": "text/csv"})
        assert target.next().headers["content-type"] == "text/csv; charset=utf-8"
    assert center.counts("mail") == (0, 0, 0, 0)
