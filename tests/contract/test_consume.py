"""A loop over messages: ``with center.consume(...) as messages``, on real servers."""

from __future__ import annotations

import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from kombu_toc import ConfigurationError, Delivery, Taken, TimeoutCenter, center_for

from ..support import nursery
from ..support.cluster import Cluster
from ..support.fixtures import own_server
from ..support.inspection import announced, now_us
from ..support.servers import Server
from ..support.waiting import wait_until

HOUR = 3600.0


@pytest.fixture
def other(server: Server | Cluster, client: redis.Redis) -> TimeoutCenter:
    """Another center on the shared server, which is empty."""
    return TimeoutCenter(server.client(), grace=0)


def put(center: TimeoutCenter, *ids: str, topic: str = "mail", **options: Any) -> None:
    for id in ids:
        center.put(topic, id, id.encode(), **options)


# -- the loop


def test_messages_are_acknowledged_when_the_body_goes_on(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    put(center, "a", "b")
    put(center, "c", topic="sms")
    got = []
    with center.consume("mail", "sms", limit=10, idle=0.3) as messages:
        for message in messages:
            assert isinstance(message, Delivery) and isinstance(message, Taken)
            got.append((message.topic, message.id, message.body))
            left = 4 - len(got)
            assert other.counts("mail").in_flight + other.counts("sms").in_flight == left
    assert sorted(got) == [("mail", "a", b"a"), ("mail", "b", b"b"), ("sms", "c", b"c")]
    for topic in ("mail", "sms"):
        assert sum(center.counts(topic)) == 0


def test_the_loop_waits_for_messages_and_ends_when_nothing_came_for_long_enough(
    center: TimeoutCenter, client: redis.Redis
) -> None:
    began = time.monotonic()
    at = now_us(client) / 1e6
    put(center, "soon", at=at + 0.2)
    put(center, "later", at=at + 0.6)
    put(center, "never", delay=HOUR)
    with center.consume("mail", idle=2) as messages:
        assert [message.id for message in messages] == ["soon", "later"]
    assert 2.6 <= time.monotonic() - began < 12
    assert len(announced(center, "mail")) == 1


def test_with_no_idle_time_at_all_it_takes_what_is_there(center: TimeoutCenter) -> None:
    put(center, "a", "b", "c")
    with center.consume("mail", idle=0) as messages:
        assert {message.id for message in messages} == {"a", "b", "c"}


def test_a_message_that_the_body_settles_is_left_alone(center: TimeoutCenter) -> None:
    put(center, "acked", "rejected", "dead", "released", "by center")
    seen: list[str] = []
    with center.consume("mail", limit=10, idle=0) as messages:
        for message in messages:
            if message.id in seen:
                message.ack()
                continue
            seen.append(message.id)
            if message.id == "acked":
                assert message.ack() is True
                assert message.ack() is False
            elif message.id == "rejected":
                assert message.reject(error="once more", backoff=HOUR) == "waiting"
            elif message.id == "dead":
                assert message.reject(requeue=False, reason="no use") == "dead"
            elif message.id == "released":
                center.reschedule("released", delay=HOUR)
                assert message.release() is True
            else:
                assert center.ack([message.receipt]) == 1
    assert sorted(seen) == sorted(["acked", "rejected", "dead", "released", "by center"])
    assert center.counts("mail").dead == 1
    [rejected] = center.get("rejected")
    assert (rejected.state, rejected.error, rejected.retries_left) == ("waiting", "once more", 15)


def test_the_message_whose_body_raises_comes_back_with_one_retry_less_and_the_others_as_they_were(
    center: TimeoutCenter,
) -> None:
    center.queues.declare("mail", slots=1, retries=5, retry_backoff=HOUR, retry_backoff_max=HOUR)
    put(center, "first", "second", "third")
    with pytest.raises(ValueError, match="broken"), center.consume("mail", limit=10) as messages:
        for message in messages:
            if message.id == "second":
                raise ValueError("broken")
    assert center.counts("mail").in_flight == 0
    assert center.get("first") == []
    [second] = center.get("second")
    assert (second.retries_left, second.state) == (4, "waiting")
    assert second.time_us > 0  # after its back-off
    assert re.fullmatch(r"ValueError: broken \(.*test_consume\.py:\d+\)", second.error)
    [third] = center.get("third")
    assert (third.retries_left, third.error) == (None, "")


def test_whoever_leaves_the_loop_gives_back_what_was_not_handled(center: TimeoutCenter) -> None:
    put(center, "a", "b", "c")
    with center.consume("mail", limit=10) as messages:
        for _ in messages:
            break
    assert center.counts("mail").ready == 3
    assert all(found.retries_left is None for found in center.scan("mail").messages)

    with pytest.raises(KeyboardInterrupt), center.consume("mail", limit=10) as messages:
        for _ in messages:
            raise KeyboardInterrupt
    assert center.counts("mail").ready == 3


def test_without_auto_ack_the_body_says_when_a_message_is_done(center: TimeoutCenter) -> None:
    put(center, "a", "b", "c")
    with center.consume("mail", limit=2, idle=0, auto_ack=False) as messages:
        taken = list(messages)
        assert center.counts("mail").in_flight == 3
        center.ack(taken[:2])
    assert center.counts("mail").in_flight == 0
    assert [found.id for found in center.scan("mail").messages] == [taken[2].id]


# -- leases


def test_leases_are_renewed_while_the_body_runs_also_of_what_was_fetched_ahead(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    center.queues.declare("mail", visibility=3)
    put(center, "a", "b")
    deadline = time.monotonic() + 4  # longer than a lease
    with center.consume("mail", limit=10, idle=0) as messages:
        for message in messages:
            while time.monotonic() < deadline:
                assert other.pop("mail").messages == []
                time.sleep(0.02)  # as one who looks now and then
            assert not message.lost
    assert sum(center.counts("mail")) == 0


def test_each_lease_is_as_long_as_its_message_says(center: TimeoutCenter) -> None:
    center.queues.declare("mail", visibility=60)
    put(center, "short", visibility=4)
    put(center, "long", visibility=500)
    with center.consume("mail", limit=10, auto_ack=False, idle=0) as messages:
        [*_] = messages
        before = {one.id: one.time_us for one in center.scan("mail", state="in flight").messages}
        wait_until(
            lambda: (
                {one.id: one.time_us for one in center.scan("mail", state="in flight").messages}
                != before
            )
        )
        ends = {
            one.id: one.time_us - now_us(center.client)
            for one in center.scan("mail", state="in flight").messages
        }
    assert 0 < ends["short"] <= 4_000_000
    assert 490_000_000 < ends["long"] <= 500_000_000


def test_a_lease_that_is_lost_is_told(
    center: TimeoutCenter, other: TimeoutCenter, caplog: pytest.LogCaptureFixture
) -> None:
    center.queues.declare("mail", visibility=1)
    put(center, "a")
    with center.consume("mail", idle=0) as messages, caplog.at_level(logging.WARNING):
        for message in messages:
            other.cancel("a", topic="mail", in_flight=True)
            wait_until(lambda taken=message: taken.lost)
    assert "leases ended before they were renewed" in caplog.text
    assert "message a of mail was gone when it was acknowledged" in caplog.text


def test_what_was_lost_before_its_turn_is_not_handed_to_the_body(
    center: TimeoutCenter, other: TimeoutCenter
) -> None:
    center.queues.declare("mail", visibility=1, slots=1)
    put(center, "a", "b", "c")
    got = []
    with center.consume("mail", limit=3, idle=0) as messages:
        for message in messages:
            got.append(message.id)
            if message.id == "a":
                other.cancel("b", topic="mail", in_flight=True)
                wait_until(lambda: len(messages.held) == 2)
    assert got == ["a", "c"]


def test_the_thread_ends_with_the_block_and_is_not_started_for_nothing(
    center: TimeoutCenter,
) -> None:
    def threads() -> int:
        return sum(thread.name == "toc-consume" for thread in threading.enumerate())

    before = threads()
    with center.consume("mail", idle=0) as messages:
        assert list(messages) == []
        assert threads() == before
    put(center, "a")
    with center.consume("mail") as messages:
        next(messages)
        assert threads() == before + 1
    assert threads() == before


# -- processes


EXAMPLE = """
import sys
from kombu_toc import center_for

center = center_for(sys.argv[1])
with center.consume("mail", "sms", limit=10) as messages:
    for message in messages:
        print(message.id, flush=True)
        if message.id == "stop":
            message.ack()
            break
"""


def program(server: Server | Cluster) -> subprocess.Popen[str]:
    return nursery.Popen(
        [sys.executable, "-c", EXAMPLE, server.toc_url], stdout=subprocess.PIPE, text=True
    )


@own_server
def test_a_program_that_consumes_is_interrupted_without_harm(
    server: Server | Cluster, center: TimeoutCenter, client: redis.Redis
) -> None:
    with program(server) as process:
        put(center, "a")
        assert process.stdout.readline() == "a\n"
        put(center, "b", topic="sms")
        assert process.stdout.readline() == "b\n"
        wait_until(lambda: client.info("clients")["blocked_clients"])
        put(center, "later", delay=HOUR)
        wait_until(lambda: not announced(center, "mail"))
        wait_until(
            lambda: client.info("clients")["blocked_clients"]
        )  # what it has claimed it knows now
        process.send_signal(signal.SIGINT)
        assert process.wait(20) != 0
    assert len(announced(center, "mail")) == 1
    assert center.counts("mail").in_flight == center.counts("sms").in_flight == 0


def test_a_forked_child_holds_nothing_of_its_parents(center: TimeoutCenter) -> None:
    center.queues.declare("mail", visibility=1)
    put(center, "a", "b", "c")
    with center.consume("mail", limit=10, idle=0, auto_ack=False) as messages:
        next(messages)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                with messages:
                    pass
            except RuntimeError:  # entered before
                messages.__exit__(None, None, None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert center.counts("mail").in_flight == 3
        assert len(messages.held) == 3
    assert center.counts("mail").ready == 3


def test_a_message_that_is_sent_to_another_process_is_a_plain_delivery(
    center: TimeoutCenter,
) -> None:
    put(center, "a")
    with center.consume("mail", idle=0) as messages:
        for message in messages:
            copy = pickle.loads(pickle.dumps(message))
            assert type(copy) is Delivery and copy == message
            assert center.ack(copy) == 1


# -- faults


@pytest.mark.one_server("a Cluster has no server that could be stopped and started alone")
def test_an_acknowledgement_waits_for_a_server_that_is_restarted(tmp_path: Path) -> None:
    with Server(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        center = center_for(server.toc_url)
        put(center, "a", "b")
        with center.consume("mail", idle=1) as messages:
            for message in messages:
                if message.id == "a":
                    server.stop()
                    threading.Timer(0.5, server.start).start()
        assert sum(center.counts("mail")) == 0


@pytest.mark.one_server("a Cluster has no server that could be stopped alone")
def test_an_error_of_the_body_is_not_hidden_by_a_server_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(tmp_path) as server:
        center = center_for(server.toc_url)
        put(center, "a")
        with pytest.raises(ValueError, match="mine"), center.consume("mail") as messages:
            for _ in messages:
                server.kill()
                raise ValueError("mine")
        assert "come back when their leases end" in caplog.text


# -- bad input


def test_what_makes_no_sense_is_refused_before_anything_is_taken(center: TimeoutCenter) -> None:
    put(center, "a")
    for topics, options, text in (
        ((), {}, "no topic is named"),
        ((["mail"],), {}, "named by a str"),
        (("mail",), {"limit": 0}, "a limit of at least 1"),
        (("mail",), {"idle": -1}, "idle must be a number of seconds"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            center.consume(*topics, **options)  # type: ignore[arg-type]
    messages = center.consume("mail")
    with pytest.raises(RuntimeError, match="in a block"):
        next(messages)
    with messages:
        pass
    with pytest.raises(RuntimeError, match="used before"), messages:
        pass
    assert center.counts("mail").ready == 1


def test_what_is_settled_as_another_loop_ends_is_settled_in_its_own(center: TimeoutCenter) -> None:
    """Loops in threads of one process share a center."""
    center.put("mail", "m", b"x")
    with center.consume("sms") as another, center.consume("mail") as messages:
        message, everybody = next(messages), another.center.on_settled
        ends = everybody[0]
        everybody[0] = lambda _: everybody.pop(0)  # as its thread does
        center.ack(message)
        assert message not in messages.held
        everybody.insert(0, ends)
