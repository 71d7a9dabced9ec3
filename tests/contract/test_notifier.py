"""The notifier: real processes, and real servers that receive."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
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
from ..support.inspection import put_some
from ..support.loops import in_loop
from ..support.notifier import OK, SECRET, NotifierProcess, Received, Reply, Target, signatures
from ..support.servers import Server

Anywhere = Server | Cluster

#: A target may be tried again after many seconds.
wait_until = partial(waiting.wait_until, seconds=60)


def dead(center: TimeoutCenter, queue: str = "mail") -> list[Found]:
    return center.scan(queue, state=DEAD).messages


class Hooks:
    """Targets, what waits for them, and notifiers, on the shared server; all end with the test."""

    def __init__(
        self, server: Anywhere, center: TimeoutCenter, stack: contextlib.ExitStack
    ) -> None:
        self.server, self.center, self._stack = server, center, stack
        self._hold = threading.Event()

    def target(self, answer: Any = None, queue: str = "mail", **limits: Any) -> Target:
        """A new one, of that queue, or of none. answer: as Target takes it; or what it answers, or
        a list of what it answers to one request after the other"""
        if isinstance(answer, list):
            answers = iter(answer)
            answer = lambda _: next(answers)  # noqa: E731
        elif not callable(answer):
            reply = answer or OK
            answer = lambda _: reply  # noqa: E731
        made = self._stack.enter_context(Target(answer))
        if queue:
            self.center.queues.declare(queue, target=made.url, **limits)
        return made

    def held(self, _: Received) -> Reply:
        """Answers when that is let go."""
        self._hold.wait(60)
        return OK

    def let_go(self) -> None:
        self._hold.set()

    def start(self, *options: str, **how: Any) -> NotifierProcess:
        return self._stack.enter_context(NotifierProcess(self.server.toc_url, *options, **how))

    def put(self, number: int, body: bytes = b"x", queue: str = "mail") -> set[str]:
        """So many messages: their ids."""
        ids = [f"order-{n}" for n in range(number)]
        self.center.put_many(queue, [{"id": id, "body": body} for id in ids])
        return set(ids)

    def drained(self, queue: str = "mail") -> None:
        wait_until(lambda: self.center.counts(queue) == (0, 0, 0, 0))

    def dead(self, queue: str = "mail") -> Found:
        """The dead letter of that queue, when there is one."""
        [found] = wait_until(lambda: dead(self.center, queue))
        return found

    async def run(self, meanwhile: Callable[[AsyncTimeoutCenter], Awaitable[None]]) -> None:
        """A notifier in this process, until that is over."""
        done = asyncio.Event()
        async with AsyncTimeoutCenter.from_url(self.server.toc_url) as toc:
            running = asyncio.create_task(Notifier(toc, None, allow=["127.0.0.1"]).run(done))
            await meanwhile(toc)
            done.set()
            await running


@pytest.fixture
def hooks(server: Anywhere, center: TimeoutCenter) -> Iterator[Hooks]:
    with contextlib.ExitStack() as stack:
        made = Hooks(server, center, stack)
        stack.callback(made.let_go)
        yield made


@pytest.mark.cluster
def test_a_due_message_is_sent_to_the_target_of_its_queue_and_acknowledged(hooks: Hooks) -> None:
    """X16"""
    target = hooks.target()
    hooks.center.put("mail", "order-7", b'{"order": 7}', delay=0.2)
    notifier = hooks.start()
    got = target.next()
    assert notifier.end() == 0
    assert (got.path, got.body) == ("/hook", b'{"order": 7}')
    assert got.headers["content-type"] == "application/json"
    assert got.headers["webhook-id"].startswith("order-7_")
    assert got.headers["toc-queue"] == "mail"
    assert signatures(got, SECRET)
    assert hooks.center.counts("mail") == (0, 0, 0, 0)


def test_messages_wait_for_their_time_and_are_sent_soon_after(hooks: Hooks) -> None:
    notifier, target = hooks.start(), hooks.target()
    hooks.center.put("mail", "first", b"x")
    target.next()  # by now the queue is known
    put = time.monotonic()
    hooks.center.put("mail", "later", b"x", delay=1)
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


def test_a_message_may_have_a_target_of_its_own(hooks: Hooks) -> None:
    target, own = hooks.target(), hooks.target(queue="")
    message = {
        "headers": {"x-target": own.url, "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"},
        "properties": {},
        **{"content-type": "text/plain", "content-encoding": "utf-8"},
        "body": "remind",
    }
    hooks.start()
    hooks.center.put("mail", "own", pack(message, deflate=True, id="own"))
    hooks.center.put("mail", "other", b"x")
    assert target.next().id == "other"
    got = own.next()
    assert (got.id, got.body) == ("own", b"remind")
    assert got.headers["traceparent"].startswith("00-1111")
    assert "x-target" not in got.headers


# -- failures


def test_what_fails_comes_again_by_the_back_off_of_its_queue_and_is_dead_at_last(
    hooks: Hooks,
) -> None:
    failure = (500, {}, b"out of paper " * 1000)
    target, notifier = hooks.target(failure, retries=2, retry_backoff=0.2), hooks.start()
    hooks.center.put("mail", "order-7", b"remind")
    some = target.take(3)
    found = hooks.dead()
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
def test_without_a_back_off_of_its_queue_that_of_the_notifier_holds(hooks: Hooks) -> None:
    target = hooks.target([(500, {}, b""), OK])
    hooks.start("--backoff", "0.5")
    hooks.center.put("mail", "order-7", b"remind")
    first, second = target.take(2)
    assert second.at - first.at >= 0.49


def test_while_a_target_wants_to_be_left_alone_it_gets_nothing_that_is_put(hooks: Hooks) -> None:
    """Nor what a fetch brings that was waiting by then."""
    target = hooks.target([(429, {"retry-after": "2"}, b""), OK, OK])
    notifier = hooks.start()
    hooks.center.put("mail", "first", b"x")
    first = target.next()
    notifier.wait_for("does not take messages")
    hooks.center.put("mail", "second", b"x")
    some = target.take(2)
    assert {got.id for got in some} == {"first", "second"}
    assert min(got.at for got in some) - first.at >= 1.9
    assert {got.headers["toc-failures"] for got in some if got.id == "second"} == {"0"}


@pytest.mark.parametrize("status", [429, 503])
def test_a_target_that_says_when_to_come_again_is_left_alone_until_then(
    hooks: Hooks, status: int
) -> None:
    target = hooks.target([(status, {"retry-after": "2"}, b""), *[OK] * 5], retry_backoff=0.01)
    hooks.start("--concurrency", "1")
    ids = hooks.put(5)
    some = target.take(6)
    assert some[1].at - some[0].at >= 1.9
    assert {got.id for got in some} == ids
    hooks.drained()


@pytest.mark.cluster
def test_410_stops_the_target_until_somebody_names_one_again(hooks: Hooks) -> None:
    center, target = hooks.center, hooks.target(queue="")
    gone = hooks.target((410, {}, b"moved away"), retries=3)
    ids = hooks.put(300)
    notifier = hooks.start("--concurrency", "4")
    assert "celery toc topic set mail --target URL" in notifier.wait_for("410 Gone")
    wait_until(lambda: center.counts("mail") == (300, 0, 0, 0))
    described = center.queues.describe("mail")
    assert described.limits["target"].value == gone.url
    assert (described.target_stopped or "").startswith("HTTP 410 at 20")
    assert gone.received.qsize() <= 8
    center.queues.alter("mail", retries=4)  # leaves it stopped
    assert center.queues.describe("mail").target_stopped
    center.queues.alter("mail", target=target.url)
    assert center.queues.describe("mail").target_stopped is None
    assert {got.id for got in target.take(300)} == ids
    assert "0" in {got.headers["toc-failures"] for got in gone.received.queue}
    notifier.end()
    assert center.counts("mail") == (0, 0, 0, 0)


def test_410_of_a_messages_own_target_ends_that_message_only(hooks: Hooks) -> None:
    center, target, gone = hooks.center, hooks.target(), hooks.target((410, {}, b""), "")
    message: dict[str, Any] = {"headers": {"x-target": gone.url}, "body": b"x"}
    center.put("mail", "own", pack(message, deflate=False))
    hooks.start()
    found = hooks.dead()
    assert (found.id, found.reason) == ("own", "HTTP 410")
    center.put("mail", "other", b"x")
    assert target.next().id == "other"
    assert center.queues.describe("mail").target_stopped is None


def test_redirects_are_not_followed(hooks: Hooks) -> None:
    other = hooks.target(queue="")
    hooks.target((307, {"location": other.url}, b""), retries=0)
    hooks.start()
    hooks.center.put("mail", "order-7", b"remind")
    assert "HTTP 307 (redirects are not followed)" in hooks.dead().error
    assert other.connections == 0


def test_nobody_there_and_no_such_name_are_failures_that_say_so(hooks: Hooks) -> None:
    with Target() as target:
        nobody = target.url
    for queue, url in (("mail", nobody), ("sms", "https://nowhere.invalid/")):
        hooks.center.queues.declare(queue, target=url, retries=0)
        hooks.center.put(queue, "order-7", b"remind")
    hooks.start()
    assert "onnect" in hooks.dead().error
    assert "its name cannot be resolved" in hooks.dead("sms").error


def test_what_answers_too_slowly_or_without_end_holds_nothing_up(hooks: Hooks) -> None:
    """One never answers; one sends a byte now and then; one sends without end, and has taken it."""
    ended = threading.Event()

    def drip(listening: socket.socket, head: bytes, piece: bytes, pause: float) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(head)
                while not ended.wait(pause):
                    connection.sendall(piece)

    head = b"HTTP/1.1 %d X\r\ncontent-length: 1000000000000\r\n\r\n"
    hooks.target(hooks.held, "silent", retries=0)
    hooks.center.put("silent", "order-7", b"remind")
    with (
        socket.create_server(("127.0.0.1", 0)) as slow,
        socket.create_server(("127.0.0.1", 0)) as endless,
    ):
        how = {"slow": (slow, 500, b"x", 0.1), "endless": (endless, 200, b"x" * 65536, 0)}
        for queue, (listening, status, piece, pause) in how.items():
            args = (listening, head % status, piece, pause)
            threading.Thread(target=drip, args=args, daemon=True).start()
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            hooks.center.queues.declare(queue, target=url, retries=0)
            hooks.center.put(queue, "order-7", b"remind")
        notifier = hooks.start("--timeout", "1")
        assert "no answer within 1 seconds" in hooks.dead("silent").error
        found = hooks.dead("slow")
        assert found.reason == "no retries left: HTTP 500"
        assert re.match(r"http://127.0.0.1:\d+/: HTTP 500 X\nxxx", found.error)
        hooks.drained("endless")
        notifier.end()
        ended.set()
        for listening in (slow, endless):
            listening.shutdown(socket.SHUT_RDWR)


# -- where it sends to


def test_addresses_that_are_not_public_are_refused_unless_they_are_allowed(hooks: Hooks) -> None:
    target = hooks.target(queue="")
    hosts = ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "0.0.0.0")
    urls = [f"http://127.0.0.1:{target.port}/", "http://169.254.169.254/latest/meta-data/"]
    urls += [f"https://{host}:{target.port}/" for host in hosts]
    for number, url in enumerate(urls):
        hooks.center.queues.declare(f"mail-{number}", target=url, retries=0)
        hooks.center.put(f"mail-{number}", "order-7", b"remind")
    hooks.start(allow="")
    for number, url in enumerate(urls):
        error = hooks.dead(f"mail-{number}").error
        # aiohttp refuses numbers itself, or asks the system, or hands them on.
        assert re.search("is no(t a canonical IPv4| public)? address", error), (url, error)
    assert target.connections == 0


def test_an_address_may_be_allowed_at_one_port_only(hooks: Hooks) -> None:
    target, other = hooks.target(), hooks.target(queue="sms", retries=0)
    for queue in ("mail", "sms"):
        hooks.center.put(queue, "order-7", b"remind")
    hooks.start(allow=f"127.0.0.0/8:{target.port}")
    assert target.next().id == "order-7"
    assert f"--allow 127.0.0.1:{other.port} lets it be a target" in hooks.dead("sms").error
    assert other.connections == 0


def test_a_target_is_compared_and_sent_in_its_one_form(hooks: Hooks) -> None:
    center, target = hooks.center, hooks.target(queue="")
    base = f"http://127.0.0.1:{target.port}"
    for number, path in enumerate(("/hooks/../admin", "/hooks/%2E%2e/admin", "/hooks/a/../..")):
        center.queues.declare(f"bad-{number}", target=base + path)
        center.put(f"bad-{number}", "order-7", b"remind")
    for number, path in enumerate(("/%68ooks/a?x=%7e", "/./hooks//b/c/../d", "/hooks/%2fa")):
        center.queues.declare(f"good-{number}", target=f"HTTP://127.0.0.1:{target.port}{path}")
        center.put(f"good-{number}", "order-8", b"remind")
    notifier = hooks.start(secrets=f"{base}/hooks/* {SECRET}")
    got = target.take(3)
    for _ in range(3):
        assert "bad-" in notifier.wait_for("there is no secret for its target")
    assert {one.path for one in got} == {"/hooks/a?x=~", "/hooks//b/d", "/hooks/%2Fa"}
    assert all(signatures(one, SECRET) for one in got)
    assert target.received.empty()


def test_no_name_makes_a_line_of_its_own_in_the_log(hooks: Hooks) -> None:
    forged = "mail\n2026-01-31 ERROR all is lost \x1b[2J\u202e"
    target = hooks.target((500, {}, "\x1b[2Jx\u2028y".encode()), forged)
    hooks.center.queues.declare(f"other {forged}", target="https://shop.example.com/hook")
    hooks.center.put(forged, "order-7", b"remind")
    notifier = hooks.start(secrets=f"{target.url} {SECRET}")
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


def test_a_secret_is_replaced_while_the_notifier_runs(hooks: Hooks, tmp_path: Path) -> None:
    path, new, target = tmp_path / "secrets.txt", new_secret(), hooks.target()
    path.write_text(f"* {SECRET}\n")
    notifier = hooks.start("--secrets", str(path), secrets="")
    sent = iter(range(10_000))

    def send() -> Received:
        hooks.center.put("mail", f"order-{next(sent)}", b"x")
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
    hooks: Hooks, tmp_path: Path
) -> None:
    path, target = tmp_path / "secrets.txt", hooks.target(queue="")
    path.write_text(f"https://shop.example.com {SECRET}\n")
    hooks.center.queues.declare("mail", target=f"{target.url}?key=sesame")
    hooks.center.put("mail", "order-7", b"remind")
    notifier = hooks.start("--secrets", str(path), secrets="")
    line = notifier.wait_for("there is no secret for its target")
    assert target.url in line and "sesame" not in line
    assert hooks.center.counts("mail") == (1, 0, 0, 0)
    path.write_text(f"http://127.0.0.1:{target.port} {SECRET}\n")
    assert signatures(target.next())
    assert target.received.empty()


def test_who_wants_no_signatures_has_to_say_so(hooks: Hooks) -> None:
    with pytest.raises(AssertionError, match="there are no secrets, so nothing could be signed"):
        hooks.start(secrets="")
    target, notifier = hooks.target(), hooks.start(secrets=None)
    hooks.center.put("mail", "order-7", b"remind")
    assert "webhook-signature" not in target.next().headers
    assert any("Nothing is signed" in line for line in notifier.said)


# -- many of them


@pytest.mark.cluster
def test_several_share_the_work_and_each_message_is_sent_once(hooks: Hooks) -> None:
    secrets = [new_secret() for _ in range(3)]
    both = threading.Barrier(3)

    def answer(got: Received) -> Reply:
        if got.id.startswith("first"):
            both.wait(60)  # only if each has one of these under way does this end
        return OK

    target = hooks.target(answer)
    processes = [hooks.start("--concurrency", "1", secrets=f"* {one}") for one in secrets]
    hooks.center.put_many("mail", [{"id": f"first-{n}", "body": b"x"} for n in range(3)])
    hooks.put(60)
    some = target.take(63)
    hooks.drained()
    assert [one.end() for one in processes] == [0, 0, 0]
    assert target.received.empty()
    assert len({got.id for got in some}) == 63
    assert {one for got in some for one in secrets if signatures(got, one)} == set(secrets)


@pytest.mark.cluster
def test_a_notifier_is_among_the_consumers_of_the_queues_that_it_sends(hooks: Hooks) -> None:
    queues, notifier = hooks.center.queues, hooks.start()
    for queue in ("mail", "sms"):
        hooks.target(queue=queue)
    wait_until(lambda: set(queues.consumers()) == {"mail", "sms"})
    assert [one.pid for one in queues.consumers()["mail"]] == [notifier.process.pid]
    queues.alter("sms", target=None)
    wait_until(lambda: set(queues.consumers()) == {"mail"})
    notifier.end()
    assert queues.consumers() == {}


def test_one_that_is_killed_loses_nothing(hooks: Hooks) -> None:
    """It is killed with requests under way; the other one sends these again."""
    target = hooks.target(hooks.held)
    ids = hooks.put(200)
    killed = hooks.start("--timeout", "2", "--concurrency", "20")
    first = {got.id for got in target.take(20)}
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    hooks.let_go()
    assert hooks.center.counts("mail").in_flight == 20
    hooks.start("--timeout", "2")
    hooks.drained()
    second = [target.received.get() for _ in range(target.received.qsize())]
    assert len(second) == 200
    assert {got.id for got in second} == ids
    assert {got.id for got in second if got.headers["toc-failures"] == "1"} == first


def test_leases_are_short_however_long_a_request_may_take_and_renewed_meanwhile(
    hooks: Hooks,
) -> None:
    """So what a killed one had under way comes again soon."""

    def left() -> float:
        """Seconds until its lease ends."""
        [found] = hooks.center.get("order-7", topic="mail")
        assert found.state == IN_FLIGHT
        return found.time_us / 1e6 - time.time()

    target = hooks.target(hooks.held)
    hooks.start("--timeout", "3600")
    hooks.center.put("mail", "order-7", b"remind")
    target.next()
    first = left()
    assert first <= LEASE + 1
    wait_until(lambda: left() < first - 1)
    before = left()
    wait_until(lambda: left() > before)
    hooks.let_go()
    hooks.drained()
    assert target.received.empty()


def test_one_that_stood_still_sends_nothing_that_another_one_has(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still when it has fetched a message, until its lease has ended."""
    center, target = hooks.center, hooks.target()
    theirs: list[Delivery] = []

    async def exchange(self: Link, *args: Any, real: Any = Link.exchange) -> Any:
        replies = await real(self, *args)
        if not theirs and center.counts("mail").in_flight:
            theirs.extend(wait_until(lambda: center.pop("mail", visibility=60).messages))
        return replies

    async def meanwhile(toc: AsyncTimeoutCenter) -> None:
        center.put("mail", "order-7", b"remind")
        await asyncio.to_thread(wait_until, lambda: theirs)
        await toc.put("mail", "order-8", b"remind")
        assert (await asyncio.to_thread(target.next)).id == "order-8"

    monkeypatch.setattr("kombu_toc.notify.targets.LEASE", 1.0)
    monkeypatch.setattr(Link, "exchange", exchange)
    in_loop(hooks.run(meanwhile))
    assert target.received.empty()
    assert [message.id for message in theirs] == ["order-7"]
    assert center.ack(theirs) == 1
    assert center.counts("mail") == (0, 0, 0, 0)


def test_what_was_answered_while_one_stood_still_is_not_sent_again(hooks: Hooks) -> None:
    """Although the time of the requests is over by then."""
    seconds = 5
    target, one = hooks.target(hooks.held), hooks.start(f"--timeout={seconds}")
    hooks.put(3)
    last = target.take(3)[-1]
    with one.standing_still():
        hooks.let_go()
        for _ in range(3):
            target.answered.get(timeout=30)
        wait_until(lambda: time.monotonic() > last.at + seconds)
    hooks.drained()
    assert target.received.empty()


@pytest.mark.parametrize("limits", [{}, night({"concurrency": 20})], ids=["any", "limited"])
def test_what_one_has_under_way_it_does_not_send_again_although_its_leases_have_ended(
    hooks: Hooks, limits: dict[str, Any]
) -> None:
    """Others have rolled it back while it stood still, and it is the one that fetches it again."""
    center = hooks.center

    def all_are_back() -> bool:
        center.release(center.pop("mail", 1).messages)
        return center.counts("mail").ready == 10

    short = "from kombu_toc.notify import __main__, targets; targets.LEASE = 2; __main__.main()"
    target, one = hooks.target(hooks.held, **limits), hooks.start(command=("-c", short))
    hooks.put(10)
    target.take(10)
    with one.standing_still():
        wait_until(all_are_back)
    wait_until(lambda: center.counts("mail").in_flight == 10)
    hooks.let_go()
    hooks.drained()
    assert target.received.empty()


def test_what_one_had_fetched_again_before_it_was_acknowledged_is_not_sent_again(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of that only when the message is done. Where places are limited, the message still
    holds one."""
    center, target = hooks.center, hooks.target(hooks.held, concurrency=5)
    fetched, acked = threading.Event(), asyncio.Event()

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

    async def meanwhile(_: AsyncTimeoutCenter) -> None:
        await asyncio.to_thread(target.next)
        await asyncio.to_thread(wait_until, is_fetched_again)
        hooks.let_go()
        await asyncio.to_thread(hooks.drained)

    monkeypatch.setattr("kombu_toc.notify.targets.LEASE", 1.0)
    monkeypatch.setattr(Keeper, "run", lambda _: asyncio.sleep(600))  # it renews nothing
    monkeypatch.setattr(Keeper, "is_unsure", lambda _: True)
    monkeypatch.setattr(Keeper, "unsure_for", 60)
    monkeypatch.setattr(Notifier, "pop", pop)
    monkeypatch.setattr(Settler, "ack", ack)
    center.put("mail", "order-7", b"remind")
    in_loop(hooks.run(meanwhile))
    assert target.received.empty()


def test_one_that_is_told_to_end_ends_what_is_under_way(hooks: Hooks) -> None:
    target = hooks.target(hooks.held)
    hooks.put(5)
    notifier = hooks.start("--concurrency", "2")
    target.take(2)
    tell_to_end(notifier)
    hooks.let_go()
    assert notifier.process.wait(60) == 0
    assert hooks.center.counts("mail") == (3, 0, 0, 0)
    assert target.received.empty()


def tell_to_end(notifier: NotifierProcess) -> None:
    """Send it a TERM. Nothing tells that it has got the signal, but that it takes its handler away
    with the first; what ends before would be fetched for."""
    notifier.process.send_signal(signal.SIGTERM)
    status = Path(f"/proc/{notifier.process.pid}/status")

    def is_caught() -> bool:
        [caught] = re.findall(r"(?m)^SigCgt:\s*(\w+)", status.read_text())
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    wait_until(lambda: not is_caught())


def test_one_slow_target_does_not_delay_others(hooks: Hooks) -> None:
    """Also if there are so many queues that one pop waits for several."""
    slow, fast = hooks.target(hooks.held, "slow"), hooks.target(queue="fast")
    queues = [f"fast-{n}" for n in range(60)]
    for queue in queues:
        hooks.center.queues.declare(queue, target=fast.url, slots=1)
    hooks.put(100, queue="slow")
    hooks.start("--concurrency", "10")
    slow.take(10)  # it has all that it may have
    for round_ in range(2):
        for queue in queues:
            hooks.center.put(queue, f"order-{round_}", b"x")
        assert len({got.headers["toc-queue"] for got in fast.take(60)}) == 60
    assert slow.received.empty()
    hooks.let_go()
    slow.take(90)
    hooks.drained("slow")


def test_a_slow_target_of_single_messages_does_not_delay_the_others_of_its_queue(
    hooks: Hooks,
) -> None:
    center = hooks.center
    slow, fast = hooks.target(hooks.held, "slow"), hooks.target(queue="fast")
    usual = hooks.target()

    def put(target: Target, name: str, number: int) -> None:
        body = pack({"headers": {"x-target": target.url}, "body": b"x"}, deflate=False)
        center.put_many("mail", [{"id": f"{name}-{n}", "body": body} for n in range(number)])

    put(slow, "slow", 100)
    notifier = hooks.start("--concurrency", "8")
    slow.take(2)
    put(fast, "fast", 30)
    center.put("mail", "order-7", b"x")
    assert {got.id for got in fast.take(30)} == {f"fast-{n}" for n in range(30)}
    assert usual.next().id == "order-7"
    assert slow.received.empty()
    tell_to_end(notifier)
    # What waits for its host is given back.
    wait_until(lambda: center.counts("mail").in_flight == 2)
    hooks.let_go()
    assert notifier.process.wait(60) == 0
    assert center.counts("mail") == (98, 0, 0, 0)
    hooks.start("--concurrency", "8")
    assert len({got.id for got in slow.take(98)}) == 98
    hooks.drained()


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
def test_the_limits_of_a_queue_are_those_of_its_target(hooks: Hooks) -> None:
    answer = Meter()
    target = hooks.target(answer, concurrency=3)
    ids = hooks.put(30)
    for _ in range(2):
        hooks.start()
    assert {got.id for got in target.take(30)} == ids
    hooks.drained()
    assert answer.most == 3
    target = hooks.target(queue="calls", rate="20/s")
    hooks.put(9, queue="calls")
    some = target.take(9)
    assert some[-1].at - some[0].at >= 0.35


def test_what_a_rate_lets_start_in_a_moment_is_fetched_together(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the rate is used up, although each fetch takes a while; and nothing is sent early."""
    fetched: list[Popped] = []
    some: list[Received] = []

    def start(self: Notifier, popped: Popped, lanes: Any, real: Any = Notifier.start) -> None:
        fetched.append(popped)
        real(self, popped, lanes)

    async def meanwhile(_: AsyncTimeoutCenter) -> None:
        some.extend(await asyncio.to_thread(target.take, 18))

    monkeypatch.setattr("kombu_toc.notify.notifier.AHEAD", 0.9)
    monkeypatch.setattr(Notifier, "start", start)
    target = hooks.target(queue="calls", rate="20/s")
    hooks.put(18, queue="calls")
    in_loop(hooks.run(meanwhile))
    assert max(len(popped.messages) for popped in fetched) >= 17
    starts = sorted(one.start_us or popped.now_us for popped in fetched for one in popped.messages)
    assert len(starts) == 18
    assert min(b - a for a, b in pairwise(starts)) >= 50_000
    assert some[-1].at - some[0].at >= 0.8
    assert hooks.center.counts("calls") == (0, 0, 0, 0)


def test_messages_of_a_serial_key_come_one_after_the_other_also_if_one_fails(hooks: Hooks) -> None:
    answers = [OK, OK, OK, (500, {}, b""), *[OK] * 5]
    target = hooks.target(answers, key_order="serial", retry_backoff=0.1)
    put_some(hooks.center, "mail", 8, "anna-", b"x", key="anna")
    for _ in range(2):
        hooks.start()
    some = [got.id for got in target.take(9)]
    assert some == [f"anna-{number}" for number in (0, 1, 2, 3, 3, 4, 5, 6, 7)]


def test_a_later_message_of_the_same_id_has_another_webhook_id_and_a_requeued_one_its_own(
    hooks: Hooks,
) -> None:
    target = hooks.target([OK, (500, {}, b""), OK], retries=0)
    hooks.start()
    hooks.center.put("mail", "order-7", b"remind")
    first = target.next()
    hooks.drained()
    hooks.center.put("mail", "order-7", b"remind")
    second = target.next()
    hooks.dead()
    hooks.center.dead.requeue("mail")
    third = target.next()
    assert {got.id for got in (first, second, third)} == {"order-7"}
    assert first.headers["webhook-id"] != second.headers["webhook-id"]
    assert second.headers["webhook-id"] == third.headers["webhook-id"]


@pytest.mark.one_server("messages are not moved from node to node")
def test_a_message_keeps_its_webhook_id_when_its_queue_is_resharded(hooks: Hooks) -> None:
    """Between attempts, more than once, and as a dead letter."""
    center, answers = hooks.center, [(500, {}, b"")] * 72 + [OK] * 24
    target = hooks.target(answers, slots=2, retries=2, retry_backoff=1)
    hooks.put(24)
    some: list[list[Received]] = []
    for slots in (2, 8, 1):
        reshard_topic(center, "mail", slots, settle=0.0)
        notifier = hooks.start()
        some.append(target.take(24))
        if slots == 1:
            wait_until(lambda: center.counts("mail") == (0, 0, 0, 24))
        else:
            wait_until(lambda: center.counts("mail").in_flight == 0)
        notifier.end()
    reshard_topic(center, "mail", 4, settle=0.0)
    center.dead.requeue("mail")
    hooks.start()
    some.append(target.take(24))
    ids = [{got.id: got.headers["webhook-id"] for got in one} for one in some]
    assert len(set(ids[0].values())) == 24
    assert ids == [ids[0]] * 4


@pytest.mark.cluster
def test_messages_that_share_an_id_have_webhook_ids_of_their_own(hooks: Hooks) -> None:
    """Their keys put them into several slots, and one pop fetches them."""
    target = hooks.target(slots=16)
    for number in range(8):
        hooks.center.put("mail", "order-7", b"remind", key=f"customer-{number}")
    hooks.start()
    assert len({got.headers["webhook-id"] for got in target.take(8)}) == 8


def test_a_message_that_is_cancelled_while_it_is_sent_holds_nothing_up(hooks: Hooks) -> None:
    def answer(got: Received) -> Reply:
        return OK if got.id == "order-8" else (500, *hooks.held(got)[1:])

    target = hooks.target(answer)
    hooks.start("--concurrency", "1")
    hooks.center.put("mail", "order-7", b"remind")
    target.next()
    hooks.center.cancel("order-7", in_flight=True)
    hooks.let_go()
    hooks.center.put("mail", "order-8", b"remind")
    assert target.next().id == "order-8"
    hooks.drained()


def test_a_message_of_megabytes_is_sent_whole(hooks: Hooks) -> None:
    body = b"0123456789" * 1_000_000
    target = hooks.target()
    hooks.start()
    ids = hooks.put(4, body)
    some = target.take(4)
    assert {got.id for got in some} == ids
    assert all(got.body == body and signatures(got) for got in some)


def test_messages_that_are_small_while_they_wait_do_not_fill_the_memory(hooks: Hooks) -> None:
    answer = Meter()
    body = b"0" * (15 << 20)
    message = pack({"headers": {}, "content-type": "text/plain", "body": body}, deflate=True)
    assert len(message) < 20_000
    target = hooks.target(answer)
    hooks.start()
    ids = hooks.put(12, message)
    some = target.take(12)
    assert {got.id for got in some} == ids
    assert all(len(got.body) == 15 << 20 for got in some)
    assert answer.most <= 3  # 32 MiB, and the one that goes beyond


@pytest.mark.cluster
def test_a_paused_queue_is_not_sent_until_it_is_resumed(hooks: Hooks) -> None:
    targets = {queue: hooks.target(queue=queue) for queue in ("mail", "sms")}
    for queue in targets:
        hooks.center.put(queue, "order-7", b"remind")
    hooks.center.queues.pause("mail")
    hooks.start()
    targets["sms"].next()
    assert hooks.center.counts("mail") == (1, 0, 0, 0)
    assert targets["mail"].received.empty()
    hooks.center.queues.resume("mail")
    targets["mail"].next()


def test_it_goes_on_when_the_broker_is_back(tmp_path: Path) -> None:
    own = Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    with own as server, Target() as target, server.client() as client:
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
