"""Topics as wholes: declaring, counting, purging, deleting, going stale; and the wake index."""

from __future__ import annotations

import itertools
import threading
from functools import partial

import pytest

from kombu_toc import (
    ConfigurationError,
    ScheduleChange,
    ScheduleFiring,
    SlotCountError,
    TimeoutCenter,
)
from kombu_toc.model.results import Counts

from ..support.inspection import (
    announced,
    check_slots,
    is_memory,
    keys_left,
    now_us,
    pop_call,
    put_call,
    put_some,
    residue,
    slot_keys,
    time_passes,
)
from ..support.ports import free_port
from ..support.servers import Server
from ..support.waiting import wait_until

HOUR = 3600.0


# -- declarations


def test_threads_may_use_a_topic_while_others_have_it_read_anew(server, client):
    """Each hour of this center's clock lasts for one look at it: what it knows is always old."""
    center = TimeoutCenter(client, slots=8)
    center.queues.declare("mail")
    hours = itertools.count(1)

    def another_thread_forgets() -> float:
        thread = threading.Thread(target=center.registry.forget, args=("mail",))
        thread.start()
        thread.join()
        return next(hours) * HOUR

    center.registry.clock = another_thread_forgets
    # Read anew; read and gone; and not known at all: each with somebody who forgets in between.
    assert center.registry.topic("mail").slots == 8
    center.registry.declared("mail")
    client.hdel(center.keys.topics, "mail")
    assert center.registry.topic("mail").slots == 8
    assert center.registry.topic("mail").slots == 8


def test_a_topic_has_one_slot_and_eight_on_a_cluster_unless_somebody_says_otherwise(client):
    """A1"""
    center = TimeoutCenter(client)
    assert center.registry.topic("mail").slots == (8 if center.clustered else 1)
    assert TimeoutCenter(client, slots=32).registry.topic("other").slots == 32
    assert center.queues.names() == ["mail", "other"]


def test_what_a_declaration_leaves_out_agrees_with_any(center, client):
    """A1, A2: whatever the default is; a message that one puts is popped by the other"""
    center.queues.declare("mail", slots=16, retries=3, visibility=90)
    other = TimeoutCenter(client, slots=64)
    topic = other.queues.declare("mail")
    assert (topic.slots, topic.declaration.retries, topic.declaration.visibility) == (16, 3, 90)
    put_some(other, "mail", 20, "")
    assert len(center.pop("mail", 50).messages) == 20


@pytest.mark.parametrize("limits", [{"slots": 3}, {"retries": 99}, {"visibility": 0}])
def test_a_declaration_that_makes_no_sense_leaves_nothing_behind(center, client, limits):
    with pytest.raises(ConfigurationError, match="'mail'"):
        center.queues.declare("mail", **limits)
    assert keys_left(client) == []


@pytest.mark.parametrize("name", ["a{b}c", "{}", "100%", "ü\n", "toc", "a:1"])
def test_a_topic_may_have_any_name(center, client, name):
    """A4"""
    center.put(name, "x", b"1")
    center.put(name, "x", b"2", delay=HOUR)
    assert center.queues.names() == [name]
    assert center.counts(name).waiting == 2
    check_slots(center, name)
    center.ack(center.pop(name).messages)
    assert center.queues.purge(name) == 1
    assert residue(client) == []


def test_topics_do_not_see_each_other_nor_do_applications_with_prefixes_of_their_own(client):
    one, two = TimeoutCenter(client, "one:toc:"), TimeoutCenter(client, "two:toc:")
    for topic, body in (("a", b"1"), ("b", b"2")):
        one.put(topic, "x", body)
    assert [message.body for message in one.pop("a", 5).messages] == [b"1"]
    assert one.cancel("y", topic="a") == []
    assert one.counts("b").ready == 1
    assert two.queues.names() == []
    assert two.pop("b").messages == []
    assert all(key.startswith((b"one:toc:{", b"two:toc:{")) for key in client.scan_iter())


# -- counts


def test_counts_tell_the_states_apart(center):
    """D1, D8"""
    for number in range(7):
        center.put("mail", f"s{number}", b"", delay=HOUR, priority=number)
    for number in range(6):
        center.put("mail", f"r{number}", b"", priority=number)
    messages = center.pop("mail", 3).messages
    center.reject(messages[0], requeue=False)
    assert center.counts("mail") == Counts(ready=3, scheduled=7, in_flight=2, dead=1)
    assert center.counts("mail").waiting == 10


def test_what_comes_due_is_counted_by_time(center):
    """Whatever its priority, its slot, or how often it was tried; not what is in flight or dead."""
    center.queues.declare("wide", slots=64)
    for number in range(100):
        center.put("wide", f"{number}", b"", delay=100 + 10 * number, priority=number % 10)
    put_some(center, "wide", 3, "due-")
    tried, taken = center.pop("wide", 2).messages
    center.reject(tried, requeue=True, backoff=50)
    times = [0, 10, 60, 595, 2000]  # seconds away from whatever comes due
    assert center.queues.coming("wide", times) == [1, 1, 2, 52, 102]
    center.release([taken])
    assert center.queues.coming("wide", times) == [2, 2, 3, 53, 103]
    assert center.queues.coming("nobody has declared it", [0, 1]) == [0, 0]


def test_counts_by_slot_add_up(center):
    """D1: shard sizes"""
    put_some(center, "mail", 50, "")
    by_slot = center.queues.counts_by_slot("mail")
    assert len(by_slot) == 8
    topic = center.registry.topic("mail")
    for number, counts in enumerate(by_slot):
        ids = [str(n) for n in range(50) if topic.slot_for(str(n)).number == number]
        assert counts == Counts(len(ids), 0, 0, 0)


# -- purge and delete


def test_purging_deletes_what_waits_and_nothing_else(center, client):
    """D1: clear"""
    center.put("mail", "flight", b"1")
    center.put("mail", "dead", b"1")
    flight, dead = sorted(center.pop("mail", 2).messages, key=lambda m: m.id, reverse=True)
    center.reject(dead, requeue=False)
    for number in range(30):
        center.put("mail", f"{number}", b"", delay=number and HOUR, priority=number % 10)
    copy = center.put("mail", "flight", b"2").id
    assert copy != "flight"
    assert center.queues.purge("mail") == 31
    assert center.counts("mail") == Counts(0, 0, 1, 1)
    check_slots(center, "mail")
    center.ack([flight])
    center.cancel("dead", topic="mail")
    assert residue(client) == []


def test_a_large_topic_is_purged_in_steps(one, client):
    topic = one.registry.topic("one")
    calls = [
        put_call(one, topic, f"{n}", b"", delay_us=10**9, priority=n % 2 * 9) for n in range(2500)
    ]
    one.runner.run_all(calls)
    assert one.queues.purge("one") == 2500
    assert one.queues.purge("one") == 0
    assert residue(client) == []


def test_deleting_a_topic_deletes_everything_in_it(center, client):
    for topic in ("mail", "other"):
        for body in (b"1", b"2", b"3", b"4"):
            center.put(topic, "x", body)  # copies
        center.put(topic, "later", b"", delay=HOUR)
    messages = center.pop("mail", 3).messages
    center.reject(messages[1], requeue=False)
    center.reject(messages[2], requeue=False)
    center.queues.delete("mail")
    assert center.queues.names() == ["other"]
    assert not [key for key in client.scan_iter("*mail*") if not is_memory(client, key)]
    center.queues.delete("other")
    assert keys_left(client) == []


def test_another_slot_count_is_an_error_that_names_both_and_the_remedy(center, client):
    """A1: one topic, one declaration, until it is deleted"""
    center.queues.declare("mail", slots=16)
    said = r"'mail' .*16 slots, not 4.*celery toc reshard mail --slots 4"
    with pytest.raises(SlotCountError, match=said):
        TimeoutCenter(client).queues.declare("mail", slots=4)
    assert center.registry.topic("mail").slots == 16
    center.queues.delete("mail")
    assert center.queues.declare("mail", slots=4).slots == 4


# -- nothing is left behind


def _cancel(center, messages, **how):
    center.cancel([message.id for message in messages], topic="mail", **how)


def _exhaust(center, messages):
    for message in messages:
        for _ in range(17):
            center.reject(message, requeue=True)
            center.pop("mail", 1, slots=[message.slot])


def _reject(center, messages, **how):
    for message in messages:
        center.reject(message, **how)


def _ack(center, messages):
    center.ack(messages)


#: What is done to messages in flight, so that none is left.
ENDS = {
    "ack": (_ack,),
    "roll back, ack": (
        *(
            lambda center, messages: center.extend(messages, 0),
            lambda center, _: center.pop("mail", 0),
        ),
        _ack,
    ),
    "release, purge": (
        lambda center, messages: center.release(messages),
        lambda center, _: center.queues.purge("mail"),
    ),
    "reject, cancel": (partial(_reject, requeue=False), _cancel),
    "exhaust, ack": (_exhaust, _ack),
    "cancel in flight": (partial(_cancel, in_flight=True),),
    "back off, cancel": (partial(_reject, requeue=True, backoff=HOUR), _cancel),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_drained_topic_leaves_no_key_however_its_messages_ended(center, client, end):
    """K6 and the design: no residue, ever"""
    for number in range(10):
        center.put("mail", f"{number}", b"1", priority=number)
        center.put("mail", f"{number}", b"2", delay=HOUR)
        center.reschedule(center.put("mail", f"{number}", b"3", delay=HOUR).id, topic="mail")
    for number in range(10):
        copies = [found.id for found in center.get(f"{number}", topic="mail") if "#" in found.id]
        for id in copies:
            center.reschedule(id, topic="mail")
    messages = center.pop("mail", 50).messages
    assert len(messages) == 30
    check_slots(center, "mail")
    center.put("mail", "later", b"", delay=2 * HOUR)
    center.cancel("later", topic="mail")  # what announced it goes with the last message
    for step in ENDS[end]:
        step(center, messages)
    assert residue(client) == []


# -- the wake index


def test_only_what_is_earlier_than_everything_announced_is_announced(one):
    """W3, Y5"""
    for at in (2e9, 2.2e9, 2e9, 1.9e9, 1.95e9):
        one.put("one", f"{at}-{at}", b"%d" % at, at=at)
        check_slots(one, "one")
    first = (0, 19 * 10**14)
    # On a Cluster a script cannot see what is claimed, and leaves one that may be.
    assert announced(one, "one") == ({first, (0, 2 * 10**15)} if one.clustered else {first})


def test_every_slot_announces_for_itself(center):
    """A8: no slot is left unserved"""
    for number in range(100):
        center.put("mail", f"{number}", b"", at=2e9 + number)
    assert {slot for slot, _ in announced(center, "mail")} == set(range(8))
    check_slots(center, "mail")


def test_a_claimed_time_is_not_announced_again_by_later_messages_but_if_it_is_handed_back(
    one, client
):
    """Y5: one consumer wakes for it, not the fleet"""
    one.put("one", "a", b"", at=2e9)
    before = announced(one, "one")
    assert client.zpopmin(one.keys.wake("one")) == [(b"0:2000000000000000", 2e15)]
    one.put("one", "b", b"", at=2e9)
    one.put("one", "c", b"", at=2.1e9)
    assert announced(one, "one") == set()
    hand_back = one.commands.reannounce(one.registry.resolved("one"), before)
    assert one.runner.run_all(hand_back) == [len(before)]
    assert announced(one, "one") == before
    check_slots(one, "one")
    client.zpopmin(one.keys.wake("one"))
    one.put("one", "d", b"", at=1.9e9)
    assert announced(one, "one") == {(0, 1_900_000_000_000_000)}


def test_a_pop_settles_what_its_horizon_passed_and_announces_what_comes_next(one, client):
    """A8"""
    one.put("one", "later", b"", at=2e9)
    one.put("one", "now", b"")
    assert len(announced(one, "one")) == (2 if one.clustered else 1)
    one.pop("one")
    assert announced(one, "one") == {(0, 2 * 10**15)}
    check_slots(one, "one")


def test_the_next_time_is_announced_also_if_its_first_announcement_was_settled(one):
    """A8: a pop that reaches ahead passes the time of a message that it has no room for"""
    one.put("one", "a", b"", delay=10)
    one.put("one", "b", b"", delay=20)
    declared = one.registry.topic("one")
    popped = one.runner.run(pop_call(one, declared, ready_limit=1, lookahead_us=60_000_000))
    assert [message.id for message in popped.messages] == ["a"]
    assert len(announced(one, "one")) == 1
    check_slots(one, "one")


@pytest.mark.parametrize("requeue", ["reject", "release", "backoff", "lease"])
def test_what_comes_back_is_announced(one, requeue):
    """A8"""
    one.put("one", "x", b"")
    [message] = one.pop("one").messages
    assert announced(one, "one") == set()
    if requeue == "release":
        one.release([message])
    elif requeue == "lease":
        one.extend([message], 0)
        one.pop("one", 0)
    else:
        one.reject(message, requeue=True, backoff=HOUR if requeue == "backoff" else 0)
    assert len(announced(one, "one")) == 1
    check_slots(one, "one")


def test_what_a_consumer_claimed_and_then_died_is_announced_again(one, client):
    """Y4, W5; on a Cluster, by a put in a certain part of a second"""
    one.put("one", "x", b"", delay=60)
    client.zpopmin(one.keys.wake("one"))
    one.put("one", "y", b"", delay=HOUR)
    assert announced(one, "one") == set()
    time_passes(one, "one", 61)
    names = map(str, itertools.count())
    wait_until(lambda: one.put("one", next(names), b"") and announced(one, "one"))
    assert len(announced(one, "one")) == 1


# -- topics that expire


def test_the_keys_of_a_topic_that_expires_carry_a_ttl(center, client):
    """K6: a process that dies leaves nothing behind"""
    center.queues.declare("reply", slots=1, expires=60_000)
    center.put("reply", "x", b"1")
    center.put("reply", "x", b"2", delay=HOUR, priority=9)
    keys = residue(client)
    assert len(keys) == 7
    for key in keys:
        if not key.endswith(":expiring"):
            assert 0 < client.pttl(key) <= 60_000, key


def test_a_time_that_is_announced_again_does_not_outlive_the_topic(center, client):
    """Whoever had claimed it is gone, and so is, some time later, the queue."""
    center.queues.declare("reply", slots=1, expires=60_000)
    center.put("reply", "x", b"")
    armed = center.registry.topic("reply").slot(0).announced_times
    client.zpopmin(center.keys.wake("reply"))
    [(announced, us)] = client.zrange(armed, 0, -1, withscores=True)
    earlier = int(us) - 1_000_000  # announced long ago
    client.zadd(armed, {str(earlier): earlier})
    client.zrem(armed, announced)
    center.put("reply", "y", b"", delay=HOUR)
    client.pexpire(armed, 50_000)
    center.reschedule("y", topic="reply", delay=2 * HOUR)
    assert [int(us) for _, us in client.zrange(armed, 0, -1, withscores=True)] == [earlier]
    assert 0 < client.pttl(armed) <= 50_000
    assert client.zcard(center.keys.wake("reply")) == 1
    assert client.pttl(center.keys.wake("reply")) > 0


def test_refreshing_a_topic_keeps_what_waits_in_it_and_what_is_in_flight(center, client):
    """A message with an action time beyond the expiry is not lost while somebody listens."""
    center.queues.declare("reply", slots=1, expires=60_000)
    center.put("reply", "now", b"")
    center.put("reply", "later", b"", delay=HOUR)
    center.pop("reply")
    for key in residue(client):
        client.pexpire(key, 100)
    center.expiring.refresh("reply", 60_000)
    for key in residue(client):
        if not key.endswith(":expiring"):
            assert 50_000 < client.pttl(key) <= 60_000, key


def test_a_message_never_shortens_the_life_of_the_others(center, client):
    center.queues.declare("reply", slots=1, expires=60_000)
    center.put("reply", "a", b"")
    center.expiring.refresh("reply", 600_000)
    center.put("reply", "b", b"")
    assert client.pttl(center.registry.topic("reply").slot(0).body) > 500_000


def test_a_topic_that_does_not_expire_has_no_ttl(center, client):
    center.put("mail", "x", b"")
    assert {client.pttl(key) for key in slot_keys(client)} == {-1}
    assert client.pttl(center.keys.wake("mail")) == -1
    assert client.pttl(center.keys.topics) == client.pttl(center.keys.counted("mail")) == -1


def test_a_stale_topic_is_named_to_one_client_only_and_a_refreshed_one_is_not(center, client):
    """K6; the time it went stale is set back, so that nobody has to wait"""
    center.queues.declare("reply", slots=1, retries=2, expires=60_000)
    center.queues.declare("mail")
    assert center.expiring.stale() == []
    client.zadd(center.keys.expiring, {"topic:reply": 1})
    assert center.expiring.stale() == ["topic:reply"]
    assert center.expiring.stale() == []
    client.zadd(center.keys.expiring, {"topic:reply": 1})
    center.expiring.refresh("reply", 60_000)
    assert center.expiring.stale() == []
    assert client.zscore(center.keys.expiring, "topic:reply") > now_us(client) / 1000 + 50_000
    TimeoutCenter(client).queues.delete("reply")
    center.expiring.refresh("reply", 60_000)  # who lives declares it again
    standing = TimeoutCenter(client).registry.declared("reply").declaration
    assert (standing.slots, standing.retries, standing.expires) == (1, 2, 60_000)


def test_sweeping_names_a_bounded_number(center, client):
    client.zadd(center.keys.expiring, {f"topic:{n}": 1 for n in range(10)})
    assert len(center.expiring.stale(4)) == 4
    assert len(center.expiring.stale()) == 6


# -- Redis Cluster


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """The only node of a cluster: it refuses a command whose keys are not all of one slot."""
    server = Server(tmp_path_factory.mktemp("node"), "--cluster-enabled", "yes")
    while server.port + 10_000 > 65_535:  # where a node listens for the others
        server.port = free_port()
    server.start()
    with server.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        info = partial(client.execute_command, "CLUSTER", "INFO", NEVER_DECODE=1)
        wait_until(lambda: b"cluster_state:ok" in info(), 30)
        yield client
    server.stop()


class PerSlot(TimeoutCenter):
    """Sends what concerns one slot without the wake index, which is on another node."""

    def __init__(self, client):
        super().__init__(client)
        run = self.runner.run

        def without_wake(call):
            keys = [key for key in call.keys if "{toc}:wake:" not in key]
            return run(call._replace(keys=keys))

        self.runner.run = without_wake
        self.runner.run_all = lambda calls: [*map(without_wake, calls)]
        self.runner.run_each_put = lambda calls: ([*map(without_wake, calls)], None)


@pytest.mark.parametrize("name", ["mail", "a{b}c", "%{"])
def test_every_operation_keeps_to_one_cluster_node(node, name):
    """A4, K8: the wake index aside, the keys of each script share a hash slot"""
    node.flushall()
    center = PerSlot(node)
    center.queues.declare(name, slots=2)
    for number in range(10):
        center.put(name, f"{number}", b"1", priority=number)
        center.put(name, f"{number}", b"2", delay=HOUR)
    answers = center.put_many(name, [(f"{n}", b"3" if n < 3 else b"1", 1.0) for n in range(5)])
    assert all(answer.added for answer in answers)
    assert sum(center.cancel(a.id, topic=name)[0].deleted for a in answers) == 5
    assert len(center.scan(name, limit=7).messages) == 7
    assert center.queues.summary(name)[0].counts.scheduled == 10
    assert center.queues.coming(name, [0, 2 * HOUR]) == [10, 20]
    seen = []
    for slot in range(2):
        seen += center.pop(name, 4, slots=[slot]).messages
    by_slot = [[message for message in seen if message.slot == slot] for slot in range(2)]
    for batch in by_slot:
        assert len(batch) == 4
        assert center.ack(batch[:1]) == 1
        assert center.release(batch[1:2]) == 1
        assert center.reject(batch[2], requeue=True) == "waiting"
        assert center.reject(batch[3], requeue=False) == "dead"
        assert center.extend(batch) == batch
        assert center.bury(batch[0], reason="failed") == batch[0].id
        assert center.cancel(batch[0].id, topic=name)[0].state == "dead"
    for number in range(10):
        for found in center.get(f"{number}", topic=name):
            states = {one.state for one in center.reschedule(found.id, topic=name)}
            assert states and states <= {"waiting", "dead"}
            if "#" in found.id:
                assert center.cancel(found.id, topic=name)
    for slot in range(2):
        for chosen in ({"ids": [f"{number}" for number in range(10)]}, {"where": bool}):
            picked = center.pop(name, early=True, slots=[slot], **chosen).messages
            assert picked
            assert center.release([one.receipt for one in picked]) == len(picked)
    change = ScheduleChange("s", "", "s@1", 4 * 10**15, put=ScheduleFiring("s@1", b"", 4 * 10**15))
    assert center.recurring.change(name, change).put
    assert [one.state for one in center.recurring.read(name, ["s"])[1]] == ["waiting"]
    assert center.recurring.change(name, ScheduleChange("s", "s@1", "", take_out="s@1")).taken_out
    assert center.queues.purge(name) > 0
    for batch in by_slot:
        center.cancel(batch[3].id, topic=name)
    # What remembers the latest lists goes by itself.
    left = [key for key in node.scan_iter() if b"{toc}" not in key and node.ttl(key) == -1]
    assert left == []


def test_a_script_without_the_wake_index_says_what_to_write_there(node):
    """K8: the client does it then"""
    node.flushall()
    center = PerSlot(node)
    center.queues.declare("one", slots=1)

    def raw(call):
        keys = [key for key in call.keys if "{toc}:wake:" not in key]
        return node.execute_command(*call._replace(keys=keys).command(whole=True))

    declared = center.registry.topic("one")
    assert raw(put_call(center, declared, "a", b"", at_us=2 * 10**15))[3] == [0, 2 * 10**15]
    assert raw(put_call(center, declared, "b", b"", at_us=21 * 10**14))[3] == []
    slot, us = raw(put_call(center, declared, "c", b""))[3]
    assert (slot, us <= now_us(node)) == (0, True)
    said, unsaid = raw(pop_call(center, declared, ready_limit=1))[-2:]
    assert (said, unsaid) == ([], [0, us])
