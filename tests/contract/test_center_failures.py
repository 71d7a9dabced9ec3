"""What follows a failure: back-off, DeadQueue and its bounds, and publishes that are repeated
(A5, A6, D3, W2)."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial

import pytest
from kombu import Connection

from kombu_toc import (
    ConfigurationError,
    Limits,
    ReplicationError,
    ServerError,
    TimeoutCenter,
    center_for,
)
from kombu_toc.center.calls import add_counters
from kombu_toc.center.exchanges import Bindings, binding, broadcast_call
from kombu_toc.model import scores
from kombu_toc.model.results import DEAD, WAITING

from ..support.cases import each
from ..support.inspection import (
    announced,
    check_slots,
    now_us,
    put_call,
    put_some,
    residue,
    slot_keys,
    time_passes,
)
from ..support.servers import frozen

DAY = 86400.0


def fail(center, topic="one", **kwargs):
    """Deliver the one message that is due, and reject it."""
    [message] = center.pop(topic).messages
    return center.reject(message, requeue=True, **kwargs)


def wait_of(center, client, id="x", topic="one"):
    """Seconds until the message is due."""
    [found] = center.get(id, topic=topic)
    assert found.state == WAITING
    return (found.time_us - now_us(client)) / 1e6


# -- back-off


def test_each_redelivery_waits_twice_as_long_up_to_the_longest_wait(center, client):
    center.queues.declare("one", slots=1, retry_backoff=2, retry_backoff_max=10)
    center.put("one", "x", b"")
    for expected in (2, 4, 8, 10, 10):
        assert fail(center) == WAITING
        assert expected - 0.5 < wait_of(center, client) <= expected
        check_slots(center, "one")
        assert center.pop("one").messages == []
        time_passes(center, "one", expected)


def test_an_ended_lease_waits_as_a_rejection_does(center, client):
    center.queues.declare("one", slots=1, retry_backoff=3)
    center.put("one", "x", b"")
    [message] = center.pop("one").messages
    time_passes(center, "one", 61)
    before = now_us(client)
    popped = center.pop("one")
    assert (popped.rolled_back, popped.messages) == (["x"], [])
    [waiting] = center.get("x", topic="one")
    assert waiting.state == WAITING
    # Leases and what follows them are counted in milliseconds.
    assert before // 1000 + 3000 <= waiting.time_us // 1000 <= now_us(client) // 1000 + 3000
    time_passes(center, "one", 3)
    [again] = center.pop("one").messages
    assert again.retries_left == message.retries_left - 1
    check_slots(center, "one")


def test_a_connection_sets_the_back_off_where_the_topic_does_not(client):
    center = TimeoutCenter(client, limits=Limits(retry_backoff=5))
    center.queues.declare("one", slots=1)
    center.queues.declare("own", slots=1, retry_backoff=0)
    for topic in ("one", "own"):
        center.put(topic, "x", b"")
        fail(center, topic)
    assert 4.5 < wait_of(center, client) <= 5
    assert [message.id for message in center.pop("own").messages] == ["x"]


@each(
    "limits",
    [
        {"retry_backoff": -1},
        {"retry_backoff": "soon"},
        {"retry_backoff_max": -0.5},
        {"dead_age": 0},
        {"dead_limit": 0},
        {"dead_limit": 1.5},
        {"dead_limit": True},
        {"dead_age": float("nan")},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_by_its_name(center, limits):
    [name] = limits
    with pytest.raises(ConfigurationError, match=f"'mail'.*{name}"):
        center.queues.declare("mail", **limits)
    with pytest.raises(ConfigurationError, match=name):
        TimeoutCenter(center.client, limits=Limits(**limits))
    assert center.queues.names() == []


# -- DeadQueue


def test_a_dead_message_keeps_its_reason_its_time_and_the_last_error(center, client):
    """A6"""
    center.queues.declare("one", slots=1, retries=2)
    center.put("one", "x", b"body")
    fail(center, error="ValueError: first")
    [found] = center.get("x", topic="one")
    assert (found.reason, found.error) == ("", "ValueError: first")
    fail(center, error="KeyError: second\nwith a second line")
    check_slots(center, "one")
    before = now_us(client)
    assert fail(center) == DEAD
    [found] = center.get("x", topic="one")
    assert (found.state, found.body) == (DEAD, b"body")
    assert found.reason == "no retries left: rejected again and again"
    assert found.error == "KeyError: second\nwith a second line"
    assert before // 1000 <= found.time_us // 1000 <= now_us(client) // 1000


def test_a_dead_letter_that_is_replayed_keeps_its_last_error_and_has_all_its_retries(center):
    """A6: the error until another one comes; it dies with it again if none does."""
    center.queues.declare("one", slots=1, retries=3)
    center.put("one", "x", b"")
    fail(center)
    [message] = center.pop("one").messages
    assert center.reject(message, requeue=False, error="ValueError: first") == DEAD
    assert center.dead.requeue("one") == 1
    [found] = center.get("x", topic="one")
    assert (found.state, found.reason, found.error) == (WAITING, "", "ValueError: first")
    [message] = center.pop("one").messages
    assert message.retries_left == 3
    assert center.reject(message, requeue=False, reason="no") == DEAD
    [found] = center.get("x", topic="one")
    assert (found.reason, found.error) == ("no", "ValueError: first")


def test_an_error_that_utf_8_cannot_hold_is_kept_all_the_same(center):
    center.queues.declare("one", slots=1, retries=0)
    center.put("one", "x", b"")
    assert fail(center, error="ValueError: caf\udce9", reason="caf\udce9") == DEAD
    [found] = center.get("x", topic="one")
    assert found.error == r"ValueError: caf\udce9"
    assert found.reason == r"no retries left: caf\udce9"


@pytest.mark.parametrize("requeue", [False, True])
def test_a_reason_and_an_error_are_kept_up_to_a_length(center, client, requeue):
    center.queues.declare("mail", slots=1, retries=0)
    center.put("mail", "x", b"")
    [message] = center.pop("mail").messages
    center.reject(message, requeue=requeue, reason="why " * 1_000_000, error="what " * 1_000_000)
    [found] = center.get("x")
    assert found.state == DEAD
    assert found.reason.startswith("no retries left: why why" if requeue else "why why")
    assert (len(found.reason), len(found.error)) == (1000, 4000)
    assert client.memory_usage(center.registry.topic("mail").slot(0).reasons) < 10_000


def test_a_lease_that_ends_for_the_last_time_keeps_the_error_of_an_earlier_try(center):
    center.queues.declare("one", slots=1, retries=1)
    center.put("one", "x", b"")
    fail(center, error="OSError: disk")
    assert len(center.pop("one").messages) == 1
    time_passes(center, "one", 61)
    assert center.pop("one").died == ["x"]
    [found] = center.get("x", topic="one")
    assert found.reason == "no retries left: its lease ended unacknowledged"
    assert found.error == "OSError: disk"


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_dead_message_keeps_its_priority_and_its_retries(one, overtaken):
    """Also one whose lease had ended when it was rejected."""
    one.put("one", "x", b"", priority=9)
    [message] = one.pop("one").messages
    if overtaken:
        time_passes(one, "one", 61)
        assert one.pop("one", 0).rolled_back == ["x"]
    assert one.reject(message, requeue=False) == DEAD
    [found] = one.get("x", topic="one")
    lease = scores.read_lease(found.score)
    assert (lease.step, lease.retries) == (found.step, 15 if overtaken else 16)
    assert found.step == 3


@each("end", ["ack", "cancel", "cancel in flight", "purge"])
def test_the_error_goes_with_the_message(one, client, end):
    one.put("one", "x", b"")
    fail(one, error="ValueError: no")
    if end == "ack":
        assert one.ack(one.pop("one").messages) == 1
    elif end == "cancel":
        one.cancel("x", topic="one")
    elif end == "cancel in flight":
        assert len(one.pop("one").messages) == 1
        one.cancel("x", topic="one", in_flight=True)
    else:
        assert one.queues.purge("one") == 1
    assert residue(client) == []


def bury(center, *ids):
    for id in ids:
        center.put("one", id, b"")
        [message] = center.pop("one").messages
        center.reject(message, requeue=False, reason="on purpose")


def test_dead_messages_are_kept_for_seven_days(one, client):
    bury(one, "old")
    time_passes(one, "one", 6 * DAY)
    bury(one, "young")
    assert one.pop("one").dropped == []
    time_passes(one, "one", 1 * DAY + 1)
    assert one.pop("one").dropped == ["old"]
    assert one.counts("one").dead == 1
    check_slots(one, "one")
    time_passes(one, "one", 6 * DAY)
    assert one.pop("one").dropped == ["young"]
    assert residue(client) == []


def test_a_full_dead_queue_drops_its_oldest(client):
    center = TimeoutCenter(client, limits=Limits(dead_limit=3), grace=0)
    center.queues.declare("one", slots=1)
    for id in "abcde":
        bury(center, id)
        time_passes(center, "one", 1)
    assert center.pop("one").dropped == ["b"]  # each delivery before has dropped one as well
    assert center.counts("one").dead == 3
    assert [center.get(id, topic="one") != [] for id in "abcde"] == [False, False, True, True, True]
    check_slots(center, "one")


def test_what_is_too_old_goes_also_where_fewer_are_too_many(client):
    center = TimeoutCenter(client, limits=Limits(dead_limit=3, dead_age=5), grace=0)
    center.queues.declare("one", slots=1)
    bury(center, "a", "b", "c")
    time_passes(center, "one", 6)
    keeping = TimeoutCenter(client, limits=Limits(dead_limit=9, dead_age=60), grace=0)
    bury(keeping, "d")
    assert center.pop("one").dropped == ["a", "b", "c"]
    assert center.counts("one").dead == 1


def test_the_slots_share_what_dead_queue_keeps(client):
    center = TimeoutCenter(client, limits=Limits(dead_limit=4), grace=0)
    center.queues.declare("one", slots=4)
    put_some(center, "one", "abc", basis="same")
    for message in center.pop("one", 3).messages:
        center.reject(message, requeue=False)
    assert center.pop("one").dropped == ["a", "b"]


def test_one_pop_drops_a_bounded_number(center):
    center.queues.declare("one", slots=1, dead_age=5, dead_limit=4)
    keeping = TimeoutCenter(center.client, grace=0)
    bury(center, *(f"{i:02}" for i in range(4)))
    time_passes(center, "one", 6)
    assert center.pop("one", recover=3).dropped == ["00", "01", "02"]
    assert center.pop("one", recover=0).dropped == []
    assert center.pop("one", recover=3).dropped == ["03"]
    assert keeping.counts("one").dead == 0


def test_a_copy_that_dead_queue_drops_is_forgotten_as_a_copy(center, client):
    center.queues.declare("one", slots=1, dead_age=5)
    center.put("one", "x", b"first")
    [first] = center.pop("one").messages
    center.put("one", "x", b"second")
    [copy] = center.pop("one").messages
    center.reject(copy, requeue=False)
    time_passes(center, "one", 6)
    assert center.pop("one").dropped == [copy.id]
    center.ack([first])
    assert residue(client) == []


# -- a publish that is repeated


def publish(center, id, name):
    """As the transport does, whose producers name their publishes."""
    center.runner.run_puts([put_call(center, center.registry.topic("one"), id, b"", publish=name)])


def test_the_latest_publish_is_not_added_again_although_it_is_acknowledged(center, client):
    """D3: its reply was lost, the message has run, and now it is sent again."""
    publish(center, "x", ("p", "p.1"))
    assert center.ack(center.pop("one").messages) == 1
    publish(center, "x", ("p", "p.1"))
    assert center.counts("one").waiting == 0
    assert slot_keys(client) == []


def test_another_publish_of_the_same_bytes_is_another_message(center):
    for name in ("p.1", "p.2"):
        publish(center, "x", ("p", name))
        assert center.ack(center.pop("one").messages) == 1
    publish(center, "x", ("q", "q.1"))
    assert center.counts("one").waiting == 1


def test_a_publish_that_two_producers_interleave_is_never_lost(one):
    """Whoever shares a producer between threads may get a message twice, but not less."""
    for name in ("p.1", "p.2", "p.1"):
        publish(one, name, ("p", name))
        assert one.ack(one.pop("one").messages) == 1


# -- replicas


@pytest.mark.one_server("its replica is one server; see test_cluster for a Cluster's")
def test_a_put_returns_when_enough_replicas_have_the_message(client, replica):
    center = TimeoutCenter(client, wait_replicas=1, wait_timeout=5)
    for i in range(20):
        client.script_flush()
        center.put("one", str(i), b"")
        with replica.client() as follower:
            assert TimeoutCenter(follower).counts("one").waiting == i + 1


@pytest.mark.one_server("its replica is one server; see test_cluster for a Cluster's")
def test_a_put_that_too_few_replicas_confirm_says_so_and_the_message_is_kept(client, replica):
    center = TimeoutCenter(client, wait_replicas=2, wait_timeout=0.05)
    with pytest.raises(ReplicationError, match=r"only 1 of 2 replicas"):
        publish(center, "x", ("p", "p.1"))
    assert center.counts("one").waiting == 1


@pytest.fixture
def freeze(replica):
    """Freezes the replica: it is connected, and falls behind."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(frozen(replica))


@pytest.mark.parametrize("how", ["the same put", "the same copy", "keep", "keep, a copy"])
@pytest.mark.one_server("its replica is one server; see test_cluster for a Cluster's")
def test_a_repeated_put_waits_for_the_replicas_too(client, freeze, how):
    """Its new connection has written nothing before, for which WAIT would wait."""
    center = TimeoutCenter(client, wait_replicas=1, wait_timeout=0.2)
    center.put("one", "x", b"")
    if how == "keep, a copy":
        center.put("one", "x", b"copy")
        center.ack(message for message in center.pop("one", 2).messages if message.id == "x")
    if "keep" in how:
        put = partial(center.put, "one", "x", b"", if_exists="keep")
    else:
        put = partial(center.put, "one", "x" if "copy" in how else "y", b"", token="t")
    freeze()
    with suppress(ReplicationError):
        put()
    client.connection_pool.disconnect()
    before = center.counts("one")
    with pytest.raises(ReplicationError):
        put()
    assert center.counts("one") == before
    assert len(client.keys("*:sent:=*")) == ("same" in how)


@pytest.mark.one_server("its replica is one server; see test_cluster for a Cluster's")
def test_a_repeated_broadcast_waits_for_the_replicas_too(client, freeze):
    center = TimeoutCenter(client, wait_replicas=1, wait_timeout=0.2)
    client.zadd(center.keys.bindings("news"), {"reader": 10**15})
    call = broadcast_call(center, "news", "", b"body", 10, ("p", "p.1"))
    freeze()
    for _ in range(2):
        with pytest.raises(ReplicationError):
            center.runner.run_puts([call])
        client.connection_pool.disconnect()
    assert 0 < client.ttl(center.keys.sent("p")) <= 60
    assert client.xlen(center.keys.fanout("news")) == 1


# -- a server that is full


def test_whatever_a_consumer_does_works_although_the_server_is_full(one, client, full):
    put_some(one, "one", "abcd")
    one.put("one", "later", b"", delay=60)
    client.delete(one.registry.topic("one").slot(0).announced_times, one.keys.wake("one"))
    full()
    assert one.pop("one", 0).messages == []
    assert announced(one, "one") != set(), "a pop that takes nothing announces"
    bindings = Bindings(one)
    member = binding("fanout", "", None, "reader", "*")
    assert bindings.add("news", member, 60_000) > 0
    assert bindings.add("news", member, 90_000) > 0
    messages = one.pop("one", 3).messages
    assert one.extend(messages) == []
    assert one.ack(messages[:1]) == one.release(messages[1:2]) == 1
    assert one.reject(messages[2], requeue=True, error="e") == WAITING
    [(slot, us), *_] = sorted(announced(one, "one"))
    client.delete(one.keys.wake("one"))
    assert one.runner.run_all(
        one.commands.reannounce(one.registry.resolved("one"), [(slot, us)])
    ) == [1]
    assert one.pop("one", 1).messages
    check_slots(one, "one")


def test_messages_are_picked_although_the_server_is_full(center, client, full):
    for id in "abcd":
        center.put("one", id, id.encode(), delay=60 if id in "cd" else None)
    full()
    picked = center.pop("one", ids=["a"]).messages
    picked += center.pop("one", where=lambda found: found.body == b"b").messages
    picked += center.pop("one", ids=["c", "d"], early=True).messages
    receipts = [message.receipt for message in picked]
    assert [message.id for message in picked[:2]] == ["a", "b"] and len(picked) == 4
    assert center.extend(receipts) == []
    assert center.release(receipts[:1]) == 1
    assert center.ack(receipts).stale == []  # what was released is the same message
    assert slot_keys(client) == []


def test_a_topic_that_expires_is_kept_although_the_server_is_full(center, client, full):
    """Its consumer lives: it must not lose the topic and what is in it."""
    center.queues.declare("one", expires=60_000)
    client.zadd(center.keys.expiring, {"topic:one": 1})
    full()
    center.expiring.refresh("one", 60_000)
    assert center.queues.declare("one", expires=60_000).declaration.expires == 60_000
    assert center.expiring.stale() == []


def test_a_message_is_moved_although_the_server_is_full(center, client, full):
    center.put("one", "x", b"", delay=60)
    full()
    assert [one.moved for one in center.reschedule("x", topic="one")] == [True]
    assert center.ack(center.pop("one").messages) == 1


def test_what_replaces_a_delivered_message_is_taken_although_the_server_is_full(
    server, client, full
):
    center = center_for(server.toc_url)
    topic = center.queues.declare("one", slots=1)
    full()
    with pytest.raises(ServerError, match=r"is full .*nothing was kept.* raise its maxmemory"):
        center.put("one", "refused", b"")
    for number in range(3):
        call = put_call(center, topic, f"retry {number}", b"", replaces=True)
        assert center.runner.run_puts([call])[0].added
    assert center.get("refused") == []
    assert center.ack(center.pop("one", 5).messages) == 3


def test_a_retry_with_an_id_of_its_sender_s_is_taken_although_the_server_is_full(server, full):
    """Also if it is the first of the queue whose id was chosen, or that says its slot."""
    with Connection(server.toc_url) as connection:
        connection.SimpleQueue("one").close()
        full()
        for headers in ({"id": "chosen"}, {"id": "other", "x-slot-basis": "customer 7"}):
            connection.Producer().publish(
                "again", routing_key="one", headers={**headers, "retries": 1}
            )
        with connection.SimpleQueue("one") as queue:
            for _ in range(2):
                message = queue.get(timeout=5)
                assert message.payload == "again"
                message.ack()


def test_it_is_counted_although_the_server_is_full(center, client, full):
    center.queues.declare("one")
    full()
    # By a name of its own: the process counts all the time, and tells it when it likes.
    for topic in ("one", None):
        client.delete(center.keys.minutes("one"))
        center.runner.run(add_counters(center.keys, topic, {"seen": 1}))
    assert client.hget(center.keys.counted("one"), "seen") == b"1"
    assert client.hget(center.keys.scripts, "seen") == b"1"


@pytest.mark.parametrize("wait_replicas", [0, 1])
@pytest.mark.parametrize("many", [1, 2])
def test_what_a_full_server_refuses_is_a_lost_connection_to_kombu(
    server, client, full, wait_replicas, many
):
    center = center_for(server.toc_url, toc_wait_replicas=wait_replicas)
    topic = center.queues.declare("one")
    full()
    with pytest.raises(ServerError, match="memory"):
        center.runner.run_puts([put_call(center, topic, str(i), b"") for i in range(many)])
    with (
        pytest.raises(ServerError, match="memory"),
        center.client.pipeline(transaction=False) as pipe,
    ):
        pipe.set("x", 1).execute()


def test_the_error_of_a_message_goes_with_it_although_its_first_delivery_was_released_late(one):
    """No residue: who had it first gives it back after it died, was replayed and is delivered; by
    then it is another delivery's"""
    one.put("one", "x", b"")
    [first] = one.pop("one").messages
    assert one.reject(first, requeue=False, reason="broken", error="e") == "dead"
    assert one.dead.requeue("one") == 1
    [last] = one.pop("one").messages
    assert one.release([first]) == 0
    assert one.ack([last]) == 1
    assert residue(one.client) == []
