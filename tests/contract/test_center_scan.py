"""Reading through a topic, and its dead messages (D6, A6, W1)."""

from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kombu_toc import DEAD, IN_FLIGHT, WAITING, Counts, TimeoutCenter

from ..support.cases import each
from ..support.inspection import check_slots, now_us, put_call, put_some, residue, time_passes

HOUR = 3600.0


def pages(center, *args, limit=7, **options):
    """Every message, read page by page."""
    found, after = [], None
    while True:
        page = center.scan(*args, limit=limit, after=after, **options)
        assert len(page.messages) <= limit
        found += page.messages
        after = page.after
        if after is None:
            return found
        assert len(page.messages) == limit


def fill(center, topic, number, **options):
    declared = center.registry.topic(topic)
    center.runner.run_all(
        [put_call(center, declared, f"{topic}-{n}", b"%d" % n, **options) for n in range(number)]
    )


def kill(center, topic, number, reason="why", error=""):
    """Have so many messages die."""
    fill(center, topic, number)
    for message in center.pop(topic, number).messages:
        center.reject(message, requeue=False, reason=reason, error=error)


# -- scan


def test_a_topic_is_read_in_the_order_of_time_each_message_once(center):
    """D6"""
    at = [2e9 + n * 7919 % 1000 for n in range(100)]
    for number, time in enumerate(at):
        center.put("mail", f"{number}", b"", at=time, priority=number % 10)
    found = pages(center, "mail")
    assert [one.time_us for one in found] == [int(time * 1_000_000) for time in sorted(at)]
    assert {one.id for one in found} == {f"{number}" for number in range(100)}


def test_a_message_is_read_as_get_finds_it(center):
    center.put("mail", "w", b"1", delay=HOUR, priority=9)
    center.put("mail", "f", b"2")
    center.pop("mail")
    kill(center, "mail", 1, error="err\nor")
    for one in center.scan("mail").messages:
        assert center.get(one.id, topic="mail") == [one]
    assert center.scan("mail", state=DEAD).messages[0].error == "err\nor"


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_without_a_topic_all_are_read_together_in_the_order_of_time(center, limit):
    times = {n: 2e9 + n * 7919 % 30 // 2 for n in range(30)}  # two at a time
    for number, time in times.items():
        center.put("bac"[number % 3], f"{number}", b"", at=time)
    found = pages(center, limit=limit)
    assert [one.time_us // 1000 for one in found] == [int(t * 1000) for t in sorted(times.values())]
    assert len(set(found)) == 30
    assert center.scan("nobody declared it").messages == []
    assert center.queues.names() == ["a", "b", "c"]


@pytest.mark.parametrize("state", [WAITING, IN_FLIGHT, DEAD])
def test_a_state_can_be_asked_for(center, state):
    kill(center, "mail", 5)
    fill(center, "mail", 9)
    taken = {message.id for message in center.pop("mail", 2).messages}
    found = pages(center, "mail", state=state, limit=2)
    assert {one.state for one in found} == {state}
    if state == IN_FLIGHT:
        assert {one.id for one in found} == taken
    counts = center.counts("mail")
    expected = {WAITING: counts.waiting, IN_FLIGHT: counts.in_flight, DEAD: counts.dead}[state]
    assert len(found) == expected > 0
    both = pages(center, "mail", state=[state, DEAD])
    assert {one.state for one in both} == {state, DEAD}


def test_a_span_of_time_can_be_asked_for(center):
    for number in range(50):
        center.put("mail", f"{number}", b"", at=2e9 + number * 0.25)
    found = pages(center, "mail", since=2e9 + 2.5, until=2e9 + 5)
    assert [int(one.id) for one in found] == list(range(10, 20))
    assert len(pages(center, "mail", since=2e9 + 2.5)) == 40
    assert len(pages(center, "mail", until=2e9 + 2.5)) == 10
    assert pages(center, "mail", since=3e9) == []


def test_of_many_topics_no_more_is_read_than_a_page_needs(center, client):
    """However many wait in each"""
    for topic in range(40):
        fill(center, f"{topic}", 100, delay_us=10**9)
    client.config_resetstat()
    assert len(center.scan(limit=10).messages) == 10
    read = client.info("commandstats")["cmdstat_hget"]["calls"]
    assert read < 3 * 40 * 8


def test_many_can_be_counted_and_given_another_time(center):
    center.queues.declare("mail", slots=4)
    fill(center, "mail", 700, delay_us=10**10)
    fill(center, "news", 5, delay_us=10**10)
    assert center.count("mail") == 700
    assert center.count("mail", where=lambda one: int(one.body) < 70) == 70
    assert center.count(state=[IN_FLIGHT, DEAD]) == 0
    found = pages(center, "mail", where=lambda one: int(one.body) % 2, limit=500)
    center.pop("mail")
    moved = center.reschedule(found, at=2.1e9)
    assert [one.moved for one in moved] == [True] * 350
    assert {one.time_us // 1000 for one in moved} <= set(
        range(2_100_000_000_000, 2_100_000_000_100)
    )
    assert center.count("mail", since=2.1e9) == 350
    assert len(center.reschedule(found[:10])) == 10
    messages = center.pop("mail", 20).messages
    assert sorted(one.id for one in messages) == sorted(one.id for one in found[:10])
    gone, taken = found[10], found[0]
    center.cancel(gone.id, topic="mail")
    late = center.reschedule([gone, taken], delay=HOUR)
    assert [(one.id, one.state, one.moved) for one in late] == [(taken.id, IN_FLIGHT, False)]
    check_slots(center, "mail")


def test_a_predicate_picks_and_pages_are_still_full(center):
    """D6"""
    fill(center, "mail", 300, delay_us=10**9)
    found = pages(center, "mail", where=lambda one: int(one.body) % 10 == 3, limit=4)
    assert sorted(int(one.body) for one in found) == list(range(3, 300, 10))


def test_messages_that_share_a_score_are_paged_through(center):
    """What was rolled back is due at once: its score is its retries, the same for all."""
    center.queues.declare("one", slots=1)
    fill(center, "one", 500)
    for message in center.pop("one", 500).messages:
        center.reject(message, requeue=True)
    slot = center.registry.topic("one").slot(0)
    assert len({score for _, score in center.client.zrange(slot.stores[0], 0, -1, True, True)}) == 1
    found = pages(center, "one", limit=3)
    assert len(found) == len({one.id for one in found}) == 500


def test_ids_that_differ_only_in_bytes_above_ascii_are_paged_through(center):
    """As Redis sorts them, not as a locale would."""
    center.queues.declare("one", slots=1)
    ids = [f"{a}{b}" for a in "aBäZé~" for b in "xXß中_"]
    put_some(center, "one", ids)
    for message in center.pop("one", 100).messages:
        center.reject(message, requeue=True)
    assert sorted(one.id for one in pages(center, "one", limit=1)) == sorted(ids)


def test_what_stays_is_read_once_while_others_come_and_go(center, client):
    fill(center, "mail", 200, delay_us=10**9)
    stop = threading.Event()

    def disturb():
        mine = TimeoutCenter(client)
        number = 0
        while not stop.is_set():
            number += 1
            mine.put("mail", f"new-{number}", b"", delay=HOUR if number % 2 else 0)
            mine.ack(mine.pop("mail", 3).messages)
            mine.cancel(f"new-{number - 4}", topic="mail")

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(10):
            ids = [one.id for one in pages(center, "mail") if one.id.startswith("mail-")]
            assert len(ids) == len(set(ids)) == 200
    finally:
        stop.set()
        thread.join()


def test_no_call_reads_more_than_a_bounded_number(center, client):
    """Whatever waits, and whatever is asked for: the server is never kept busy for long."""
    center.queues.declare("one", slots=1)
    fill(center, "one", 3000, delay_us=10**9)
    read = []
    run = center.runner.run

    def counted(call):
        found = run(call)
        if call.script.name == "scan":
            read.append(len(found))
        return found

    center.runner.run = counted
    center.runner.run_all = lambda calls: [counted(call) for call in calls]
    assert center.scan("one", where=lambda one: False).messages == []
    assert sum(read) == 3000
    assert max(read) <= 200
    read.clear()
    assert len(center.scan("one", limit=10).messages) == 10
    assert max(read) <= 20


@each(
    ("wrong", "said"),
    [
        ({"state": "ready"}, "'ready' is no state; there are waiting, in flight, dead"),
        ({"after": "x"}, "no page goes on after 'x'"),
        ({"after": "MTIz"}, "no page goes on after 'MTIz'"),
        ({"limit": 0}, "limit must be a whole number from 1 up, not 0"),
        ({"limit": 1.5}, "limit must be a whole number from 1 up, not 1.5"),
        ({"limit": True}, "limit must be a whole number from 1 up, not True"),
    ],
)
def test_what_makes_no_sense_is_refused(center, wrong, said):
    with pytest.raises(ValueError, match=said):
        center.scan("mail", **wrong)


# -- dead messages


def test_dead_messages_are_delivered_again_with_all_their_retries(center, client):
    """A6"""
    kill(center, "mail", 20, error="broken")
    assert center.dead.requeue("mail") == 20
    check_slots(center, "mail")
    assert center.counts("mail") == Counts(20, 0, 0, 0)
    messages = center.pop("mail", 50).messages
    assert {message.retries_left for message in messages} == {16}
    assert {one.error for one in center.scan("mail").messages} == {"broken"}
    assert {one.reason for one in center.scan("mail").messages} == {""}
    center.ack(messages)
    assert residue(client) == []


def test_a_requeued_message_is_announced_and_keeps_its_priority(center):
    center.put("mail", "x", b"", priority=9)
    center.reject(center.pop("mail").messages[0], requeue=False)
    center.dead.requeue("mail", ids=["x"])
    check_slots(center, "mail")
    assert [(one.state, one.step) for one in center.get("x")] == [(WAITING, 3)]


@pytest.mark.parametrize("topic", [None, "a"])
def test_dead_messages_are_picked_by_id_or_by_a_predicate(center, topic):
    for name in ("a", "b"):
        kill(center, name, 10, reason=f"of {name}")
    many = 1 if topic else 2
    assert center.dead.requeue(topic, where=lambda one: one.body == b"3") == many
    assert center.dead.purge(topic, where=lambda one: one.body == b"4") == many
    assert center.dead.requeue(topic, ids=["a-5", "b-5", "none"]) == many
    assert center.dead.purge(topic, ids=["a-6", "b-6"], where=lambda one: one.body == b"6") == many
    assert center.dead.purge(topic, ids=["a-7"], where=lambda one: False) == 0
    assert center.counts("a") == Counts(2, 0, 0, 6)
    for name in ("a", "b"):
        check_slots(center, name)


def test_only_dead_messages_are_requeued_or_purged(center):
    center.put("mail", "w", b"", delay=HOUR)
    center.put("mail", "f", b"")
    center.pop("mail")
    before = center.scan("mail").messages
    assert center.dead.requeue(ids=["w", "f"]) == center.dead.purge(ids=["w", "f"]) == 0
    assert center.dead.requeue() == center.dead.purge() == 0
    assert center.scan("mail").messages == before


def test_of_messages_that_share_an_id_only_the_picked_one_is_purged(center, client):
    center.put("mail", "x", b"1")
    copy = center.put("mail", "x", b"2").id
    for message in center.pop("mail", 2).messages:
        center.reject(message, requeue=False)
    assert center.dead.purge("mail", where=lambda one: one.body == b"1") == 1
    assert [one.id for one in center.get("x")] == [copy]
    assert center.dead.purge("mail", where=lambda one: one.body == b"2") == 1
    assert residue(client) == []


def test_many_dead_messages_are_purged_and_leave_nothing(center, client):
    kill(center, "mail", 1000)
    assert center.dead.purge() == 1000
    assert residue(client) == []


# -- how a topic stands


def test_a_summary_tells_what_there_is_and_how_late_it_is(center, client):
    """D1"""
    center.queues.declare("empty", slots=2)
    center.put("mail", "later", b"", delay=HOUR)
    center.put("mail", "due", b"", at=now_us(client) / 1e6 - 1)
    time_passes(center, "mail", 20)
    kill(center, "mail", 0)
    empty, mail = center.queues.summary()
    assert (empty.topic, empty.slots, empty.counts, empty.oldest_us) == (
        "empty",
        2,
        Counts(0, 0, 0, 0),
        0,
    )
    assert (mail.topic, mail.slots, mail.counts) == ("mail", 8, Counts(1, 1, 0, 0))
    assert 20_000_000 <= mail.oldest_us < 25_000_000
    assert [one.topic for one in center.queues.summary("mail")] == ["mail"]


def test_what_was_rolled_back_does_not_hide_how_long_others_have_been_due(one):
    one.put("one", "back", b"")
    one.reject(one.pop("one").messages[0], requeue=True)
    assert one.queues.summary("one")[0].oldest_us == 0
    one.put("one", "due", b"")
    time_passes(one, "one", 20)
    assert 20_000_000 <= one.queues.summary("one")[0].oldest_us < 25_000_000


# -- against a list


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    puts=st.lists(
        st.tuples(
            st.integers(0, 3),  # topics
            st.integers(-2, 12),  # when
            st.sampled_from([0, 3, 9]),
            st.booleans(),  # dead
        ),
        max_size=40,
    ),
    limit=st.integers(1, 9),
    since=st.none() | st.integers(0, 12),
    until=st.none() | st.integers(0, 12),
    state=st.sampled_from([None, WAITING, (WAITING, DEAD)]),
)
def test_whatever_is_in_there_a_scan_reads_what_was_asked_for(
    center, client, puts, limit, since, until, state
):
    """D6"""
    client.flushall()
    center.registry._known.clear()
    base = 2_000_000_000
    expected = []
    for number, (topic, when, priority, dies) in enumerate(puts):
        name, id = f"t{topic}", f"{number % 30}"
        center.queues.declare(name, slots=2)
        if dies:
            made = center.put(name, id, b"%d" % number).id
            for message in center.pop(name, 100).messages:
                center.reject(message, requeue=False)
            if since is None and state != WAITING:
                expected.append((name, made, DEAD))
            continue
        made = center.put(name, id, b"%d" % number, at=base + when, priority=priority).id
        if (since is None or when >= since) and (until is None or when < until):
            expected.append((name, made, WAITING))
    bounds = {
        "since": None if since is None else base + since,
        "until": None if until is None else base + until,
    }
    found = pages(center, limit=limit, state=state, **bounds)
    assert sorted((one.topic, one.id, one.state) for one in found) == sorted(expected)
    times = [one.time_us for one in found]
    assert times == sorted(times)
    assert center.count(state=state, **bounds) == len(found)


def test_a_page_ends_with_so_many_bytes_and_the_next_one_goes_on(center: TimeoutCenter) -> None:
    for place in range(10):
        center.put("mail", f"m-{place}", b"x" * 1_000, delay=3600 + place)
    center.put("mail", "large", b"x" * 100_000, delay=4000)
    pages, after = [], None
    while True:
        page = center.scan("mail", limit=8, size=2_500, after=after)
        pages.append([one.id for one in page.messages])
        after = page.after
        if after is None:
            break
    assert pages == [
        ["m-0", "m-1", "m-2"],
        ["m-3", "m-4", "m-5"],
        ["m-6", "m-7", "m-8"],
        ["m-9", "large"],  # the last one may have any size
    ]
    assert len(center.scan("mail", where=lambda one: one.id == "m-7", size=100).messages) == 1
    page = center.scan("mail", size=0)
    assert len(page.messages) == 1 and page.after
