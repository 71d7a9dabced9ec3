"""What holds for one message and not for its topic: visibility, max lease, expiration."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from kombu_toc import DEAD, IN_FLIGHT, Delivery, Limits, NewMessage, TimeoutCenter, TraitError
from kombu_toc.center.calls import PopRequest
from kombu_toc.center.clock import MAY_NOT
from kombu_toc.center.reshard import reshard_topic
from kombu_toc.center.upkeep import Part, Upkeep, keep

from ..support.cases import each
from ..support.fixtures import drain
from ..support.inspection import (
    aged,
    check_slots,
    full_server,
    now_us,
    put_some,
    residue,
    slot_keys,
    time_passes,
)

HOUR = 3600.0


def lease_of(center: TimeoutCenter, delivery: Delivery) -> float:
    """Seconds until its lease ends."""
    [found] = center.get(delivery.id, topic=delivery.topic)
    assert found.state == IN_FLIGHT
    return (found.time_us - now_us(center.client)) / 1e6


def pop_one(center: TimeoutCenter, topic: str = "mail", **how: float) -> Delivery:
    [delivery] = center.pop(topic, **how).messages
    return delivery


# -- visibility


@pytest.mark.parametrize(
    "asked, own, topic, seconds",
    [
        (300.0, 200.0, 100.0, 300),
        (None, 200.0, 100.0, 200),
        (None, None, 100.0, 100),
        (None, None, None, 50),
        (300.0, None, 100.0, 300),
        (None, 200.0, None, 200),
    ],
)
def test_the_caller_says_how_long_a_lease_lasts_then_the_message_then_its_topic_then_the_center(
    center: TimeoutCenter, asked, own, topic, seconds
) -> None:
    center = TimeoutCenter(center.client, limits=Limits(visibility=50))
    center.queues.declare("mail", visibility=topic)
    center.put("mail", "x", b"", visibility=own)
    delivery = pop_one(center, visibility=asked)
    assert delivery.visibility == own
    assert lease_of(center, delivery) == pytest.approx(seconds, abs=5)
    center.extend([delivery], 1000)
    assert lease_of(center, delivery) == pytest.approx(1000, abs=5)
    assert center.extend([delivery], asked) == []
    assert lease_of(center, delivery) == pytest.approx(seconds, abs=5)
    assert center.ack([delivery]) == 1
    assert slot_keys(center.client) == []


def test_a_message_keeps_its_visibility_through_every_way_back(center: TimeoutCenter) -> None:
    center.queues.declare("mail", retries=5)
    center.put("mail", "x", b"", visibility=200)
    center.put("mail", "y", b"")
    for back in (
        lambda one: center.release([one]),
        lambda one: center.reject(one, requeue=True),
        lambda one: center.extend([one], 0),
    ):
        popped = {one.id: one for one in center.pop("mail", 2).messages}
        assert popped["x"].visibility == 200
        assert popped["y"].visibility is None
        assert lease_of(center, popped["x"]) == pytest.approx(200, abs=5)
        assert lease_of(center, popped["y"]) == pytest.approx(60, abs=5)
        for one in popped.values():
            back(one)
    popped = {one.id: one for one in center.pop("mail", 2).messages}
    assert popped["x"].visibility == 200
    center.reject(popped["x"], requeue=False)
    assert center.dead.requeue("mail") == 1
    again = pop_one(center)
    assert again.visibility == 200
    assert center.ack([popped["x"], popped["y"]]) == 2  # late, and it counts: the same message
    assert slot_keys(center.client) == []


def test_a_namesake_has_traits_of_its_own_only(center: TimeoutCenter) -> None:
    center.put("mail", "x", b"first", visibility=200, expiration=HOUR)
    copy = center.put("mail", "x", b"second").id
    third = center.put("mail", "x", b"third", visibility=300).id
    popped = {one.id: one for one in center.pop("mail", 9).messages}
    assert {id: one.visibility for id, one in popped.items()} == {"x": 200, copy: None, third: 300}
    assert [one.expires_us is None for one in popped.values()] == [False, True, True]
    center.ack(popped.values())
    center.put("mail", "x", b"first")
    assert pop_one(center).visibility is None
    center.put("mail", "y", b"", visibility=200)
    center.cancel("y", topic="mail")
    center.put("mail", "y", b"")
    assert pop_one(center).visibility is None


def test_what_goes_away_by_itself_leaves_no_traits_to_a_namesake(center: TimeoutCenter) -> None:
    """The body has a time to live there, the traits have none"""
    center.queues.declare("reply", slots=1, expires=100_000)
    center.put("reply", "x", b"", visibility=200)
    slot = center.registry.topic("reply").slot(0)
    center.client.delete(slot.body, *slot.stores)
    center.put("reply", "x", b"")
    assert pop_one(center, "reply").visibility is None


@each(
    "trait, error",
    [
        ({"visibility": 0}, "message 'x': visibility must be a number of seconds from 1 up, not 0"),
        ({"visibility": "soon"}, "visibility must be a number of seconds from 1 up, not 'soon'"),
        ({"visibility": float("inf")}, "visibility must be .* not inf"),
        ({"visibility": 1e30}, "visibility must be"),
        ({"max_lease": -1}, "max_lease must be a number of seconds from 1 up, or 0 for none"),
        ({"expiration": float("nan")}, "expiration must be a number of seconds from 0 up, not nan"),
    ],
)
def test_a_trait_that_makes_no_sense_is_refused_and_nothing_is_put(
    center: TimeoutCenter, trait, error
) -> None:
    with pytest.raises(TraitError, match=error):
        center.put("mail", "x", b"", **trait)
    assert residue(center.client) == []


# -- max lease


def test_a_delivery_ends_when_its_max_lease_has_passed_although_it_is_renewed(
    center: TimeoutCenter,
) -> None:
    center = TimeoutCenter(center.client, grace=0)
    center.queues.declare("mail", max_lease=100, retries=3)
    center.put("mail", "x", b"")
    center.put("mail", "mine", b"", max_lease=30)
    center.put("mail", "free", b"", max_lease=0)
    first = {one.id: one for one in center.pop("mail", 3).messages}
    assert center.extend(first.values(), HOUR) == []
    leases = {id: round(lease_of(center, one), -1) for id, one in first.items()}
    assert leases == {"x": 100, "mine": 30, "free": HOUR}

    time_passes(center, "mail", 99)
    first = {id: aged(one, 99) for id, one in first.items()}
    assert [one.id for one in center.extend(first.values(), HOUR)] == ["mine"]
    time_passes(center, "mail", 2)
    first = {id: aged(one, 2) for id, one in first.items()}
    assert {one.id for one in center.extend(first.values(), HOUR)} == {"mine", "x"}
    counts = center.metrics.counts(center.registry.topic("mail"))
    assert counts.overran == 3

    popped = center.pop("mail", 3)
    assert sorted(popped.rolled_back) == ["mine", "x"]
    second = {one.id: one for one in popped.messages}
    assert {one.retries_left for one in second.values()} == {2}
    assert lease_of(center, second["x"]) == pytest.approx(60, abs=5)
    assert first["x"].ends_us < second["x"].ends_us
    assert center.reject(first["x"], requeue=True) is None  # another has it by now
    assert center.release([first["x"]]) == 0
    assert center.extend([second["x"]]) == []
    # As any late acknowledgement: it is the same message.
    assert center.ack([first["x"]]) == 1
    assert center.ack([second["x"], second["mine"], first["free"]]) == 2
    assert slot_keys(center.client) == []


def test_a_pop_that_is_recalled_does_not_outlive_its_max_lease(center: TimeoutCenter) -> None:
    topic = center.queues.declare("mail", slots=1, visibility=50)
    center.put("mail", "x", b"", max_lease=3)
    center.put("mail", "y", b"", visibility=20)
    request = PopRequest("me.1", [0], ready_limit=2, remember=60)
    given = center.runner.run(center.commands.pop(topic, request)).messages
    recall = center.commands.recall(topic, [0], "me.1")
    assert center.runner.run(recall).messages == given
    x, y = given
    assert lease_of(center, x) <= 3
    assert lease_of(center, y) == pytest.approx(20, abs=5)
    while now_us(center.client) <= x.ends_us:  # the server's clock
        time.sleep(0.05)
    assert center.runner.run(recall).messages == [y]
    assert center.extend(given) == [x]


# -- expiration


def test_a_message_is_not_delivered_once_it_has_been_due_for_longer_than_its_expiration(
    center: TimeoutCenter,
) -> None:
    center.put("mail", "early", b"", delay=HOUR, expiration=60)
    time_passes(center, "mail", HOUR + 59)
    center.ack([pop_one(center)])
    center.put("mail", "x", b"", delay=HOUR, expiration=60)
    center.put("mail", "stays", b"", delay=HOUR)
    time_passes(center, "mail", HOUR + 61)
    popped = center.pop("mail", 9)
    assert popped.expired == ["x"]
    assert [one.id for one in popped.messages] == ["stays"]
    [found] = center.get("x", topic="mail")
    assert (found.state, found.reason) == (DEAD, "expired")
    check_slots(center, "mail")
    counts = center.metrics.counts(center.registry.topic("mail"))
    assert (counts.expired, counts.dead) == (1, 1)


def test_the_shorter_of_a_messages_expiration_and_its_topics_holds(center: TimeoutCenter) -> None:
    center.queues.declare("mail", message_ttl=60_000)
    center.put("mail", "longer", b"", expiration=HOUR)
    center.put("mail", "shorter", b"", expiration=10)
    center.put("mail", "plain", b"")
    time_passes(center, "mail", 11)
    popped = center.pop("mail", 9)
    assert popped.expired == ["shorter"]
    assert {one.id for one in popped.messages} == {"longer", "plain"}
    center.release(popped.messages)
    time_passes(center, "mail", 50)
    popped = center.pop("mail", 9)
    assert sorted(popped.expired) == ["longer", "plain"]
    assert popped.messages == []
    check_slots(center, "mail")


def test_a_message_that_comes_back_keeps_the_time_when_it_expires(center: TimeoutCenter) -> None:
    center.queues.declare("mail", retries=9)
    center.put("mail", "x", b"", expiration=100)
    first = pop_one(center)
    assert (first.expires_us - now_us(center.client)) / 1e6 == pytest.approx(100, abs=5)
    center.reject(first, requeue=True)
    second = pop_one(center)
    assert second.expires_us == first.expires_us
    center.release([second])
    third = pop_one(center)
    center.extend([third], 0)
    fourth = pop_one(center)
    assert fourth.expires_us == first.expires_us
    center.reject(fourth, requeue=True, backoff=200)
    time_passes(center, "mail", 201)
    popped = center.pop("mail")
    assert (popped.expired, popped.messages) == (["x"], [])


@pytest.mark.parametrize("own", [True, False])
def test_where_expired_messages_are_not_kept_they_go_without_a_trace(
    center: TimeoutCenter, own: bool
) -> None:
    center.queues.declare("mail", dead_expired=False, message_ttl=None if own else 60_000)
    for body in (b"1", b"2", b"3"):
        center.put("mail", "x", body, priority=len(body), expiration=60 if own else None)
    time_passes(center, "mail", 61)
    assert len(center.pop("mail", 2).expired) == 3
    assert center.counts("mail") == (0, 0, 0, 0)
    assert slot_keys(center.client) == []
    counts = center.metrics.counts(center.registry.topic("mail"))
    assert (counts.expired, counts.dead) == (3, 0)


def test_a_pop_finds_what_is_due_behind_many_that_have_expired(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=1)
    put_some(center, "mail", 350, "", expiration=60)
    center.put("mail", "x", b"")
    time_passes(center, "mail", 61)
    popped = center.pop("mail")
    assert [one.id for one in popped.messages] == ["x"]
    assert len(popped.expired) == 350
    check_slots(center, "mail")


def test_a_message_that_is_given_another_time_expires_anew(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=1, retries=9)
    for id in ("waiting", "released", "rejected", "dead", "expired"):
        center.put("mail", id, b"", expiration=100, max_lease=50)
    popped = {one.id: one for one in center.pop("mail", 3).messages}
    assert set(popped) == {"waiting", "released", "rejected"}
    center.release([popped["waiting"], popped["released"]])
    center.reject(popped["rejected"], requeue=True)
    [dead] = center.pop("mail", slots=[0]).messages
    assert dead.id == "rejected"
    center.reject(dead, requeue=True, backoff=HOUR)
    time_passes(center, "mail", 101)
    popped = center.pop("mail", 9)
    assert sorted(popped.expired) == ["dead", "expired", "released", "waiting"]
    assert center.dead.requeue("mail") == 4
    center.reschedule("rejected", topic="mail")
    popped = center.pop("mail", 9)
    assert popped.expired == []
    assert len(popped.messages) == 5
    for one in popped.messages:
        assert one.expires_us / 1e6 == pytest.approx(now_us(center.client) / 1e6 + 100, abs=5)
        assert one.ends_us / 1e6 == pytest.approx(now_us(center.client) / 1e6 + 50, abs=5)
    center.release(popped.messages)
    for one in popped.messages:
        center.reschedule(one.id, topic="mail", delay=HOUR)
    time_passes(center, "mail", HOUR + 60)
    popped = center.pop("mail", 9)
    assert len(popped.messages) == 5
    center.release(popped.messages)
    time_passes(center, "mail", 41)
    assert len(center.pop("mail", 9).expired) == 5
    check_slots(center, "mail")


@pytest.mark.one_server("messages are not moved from node to node")
def test_a_message_keeps_its_traits_when_its_topic_is_resharded(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=4)
    for number in range(16):
        center.put("mail", f"{number}", b"1", expiration=100, visibility=200)
        center.put("mail", f"{number}", b"2", delay=HOUR, max_lease=300)
    popped = center.pop("mail", 16).messages
    center.release(popped[:12])
    center.reject(popped[12], requeue=True)
    center.reject(popped[13], requeue=False)
    center.ack(popped[14:])
    assert reshard_topic(center, "mail", 1, settle=0).done
    assert center.dead.requeue("mail") == 1
    for number in range(16):
        center.reschedule(f"{number}", topic="mail")
    popped = center.pop("mail", 99).messages
    assert sorted((one.body, one.visibility, one.ends_us is None) for one in popped) == [
        *[(b"1", 200, True)] * 14,
        *[(b"2", None, False)] * 16,
    ]
    assert all((one.expires_us is None) is (one.body == b"2") for one in popped)
    check_slots(center, "mail")


def test_upkeep_finds_what_has_expired_where_nobody_consumes(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=2, message_ttl=60_000)
    for number in range(500):
        center.put("mail", f"{number}", b"", delay=HOUR if number % 5 == 0 else None)
    [tried] = center.pop("mail").messages
    center.reject(tried, requeue=True)
    time_passes(center, "mail", 61)
    events = []
    upkeep = Upkeep(
        center.runner,
        center.registry,
        center.context,
        {},
        in_time=lambda topic, slots: True,
        tell=events.append,
        on_step=lambda seconds: None,
    )
    upkeep.run(lambda: True)
    expired = [id for event in events for id in event.expired]
    assert len(expired) == len(set(expired)) == 400
    assert tried.id in expired
    assert center.counts("mail") == (0, 100, 0, 400)
    check_slots(center, "mail")


def test_what_expires_is_looked_at_in_parts_of_a_bounded_length(center: TimeoutCenter) -> None:
    """A9, however much has expired; and whoever consumes finds what is behind it."""
    topic = center.queues.declare("mail", slots=1, message_ttl=60_000)
    center.put_many("mail", [(f"old-{number}", b"") for number in range(1000)])
    time_passes(center, "mail", 61)
    center.put("mail", "new", b"")
    looks = center.runner.run(center.commands.pop(topic, PopRequest("me.1", ready_limit=0)))
    assert (len(looks.expired), looks.messages) == (100, [])
    assert looks.more
    kept = center.runner.run(keep(center.context, [(Part(topic, (0,)), MAY_NOT)]))
    [event] = kept.events
    assert len(event.expired) == 100
    assert kept.more
    popped = center.pop("mail")
    assert [one.id for one in popped.messages] == ["new"]
    assert len(popped.expired) == 800
    check_slots(center, "mail")


@pytest.mark.one_server("one server is filled")
@pytest.mark.parametrize("drop", [True, False])
def test_a_full_server_lets_messages_expire(center: TimeoutCenter, drop: bool) -> None:
    center.queues.declare("mail", slots=1, dead_expired=not drop)
    center.put("mail", "x", b"", expiration=60)
    center.put("mail", "y", b"", visibility=200)
    time_passes(center, "mail", 61)
    used = center.client.info("memory")["used_memory"]
    with full_server(center.client, used // 2):
        popped = center.pop("mail", 2)
        assert popped.expired == ["x"]
        assert [one.visibility for one in popped.messages] == [200]
        center.release(popped.messages)
        assert pop_one(center).visibility == 200
    check_slots(center, "mail")


def test_a_message_that_is_picked_has_its_traits_and_expires(center: TimeoutCenter) -> None:
    center.put("mail", "x", b"", delay=HOUR, visibility=200, max_lease=100, expiration=60)
    [early] = center.pop("mail", ids=["x"], early=True).messages
    assert (early.visibility, early.ends_us is None) == (200, False)
    assert lease_of(center, early) == pytest.approx(100, abs=5)
    assert early.expires_us / 1e6 == pytest.approx(now_us(center.client) / 1e6 + HOUR + 60, abs=5)
    center.release([early])
    time_passes(center, "mail", HOUR + 61)
    popped = center.pop("mail", ids=["x"])
    assert (popped.expired, popped.messages) == (["x"], [])
    check_slots(center, "mail")


# -- as Kombu sends it


def publish(connection: Connection, queue: Queue, **how: Any) -> None:
    with connection.Producer() as producer:
        producer.publish({}, routing_key=queue.name, declare=[queue], **how)


def test_the_headers_of_a_message_say_its_visibility_and_its_max_lease(
    connection: Connection, center: TimeoutCenter
) -> None:
    queue = Queue("mail", queue_arguments={"x-visibility": 100, "x-max-lease": 1000})
    publish(connection, queue)
    publish(connection, queue, headers={"x-visibility": 200, "x-max-lease": "300"})
    plain, own = sorted(center.pop("mail", 2).messages, key=lambda one: one.visibility or 0)
    assert (plain.visibility, own.visibility) == (None, 200)
    assert lease_of(center, plain) == pytest.approx(100, abs=5)
    ends = [one.ends_us / 1e6 - now_us(center.client) / 1e6 for one in (plain, own)]
    assert ends == [pytest.approx(1000, abs=5), pytest.approx(300, abs=5)]


@pytest.mark.parametrize(
    "how, error",
    [
        ({"headers": {"x-visibility": "soon"}}, "x-visibility must be a number of seconds from 1"),
        ({"headers": {"x-max-lease": -5}}, "x-max-lease must be a number of seconds from 1 up, or"),
        ({"expiration": -1}, "expiration_ms must be a whole number of milliseconds from 0 up"),
    ],
)
def test_a_header_that_makes_no_sense_is_an_error_to_the_sender(
    connection: Connection, center: TimeoutCenter, how, error
) -> None:
    with pytest.raises(TraitError, match=error):
        publish(connection, Queue("mail"), **how)
    assert slot_keys(center.client) == []


@pytest.mark.parametrize("own", [True, False])
def test_kombus_expiration_and_a_queues_ttl_count_from_when_a_message_is_due(
    connection: Connection, center: TimeoutCenter, own: bool
) -> None:
    queue = Queue("mail", message_ttl=None if own else 60)
    expiration = 60 if own else None
    publish(connection, queue, expiration=expiration)
    publish(connection, queue, expiration=expiration, headers={"x-delay": 3_600_000})
    got = []
    with connection.Consumer(queue, callbacks=[lambda body, message: got.append(message)]) as one:
        one.qos(prefetch_count=1)
        drain(connection)
        assert len(got) == 1
        got.pop().ack()
        drain(connection)
    time_passes(center, "mail", HOUR + 61)
    assert queue(connection.default_channel).get() is None
    [dead] = center.scan("mail").messages
    assert (dead.state, dead.reason) == (DEAD, "expired")
    assert center.dead.requeue("mail") == 1
    message = queue(connection.default_channel).get()
    assert message.properties.get("expiration") == ("60000" if own else None)
    message.ack()
    connection.default_channel.poller.flush()


def test_what_has_celerys_own_expires_goes_to_a_worker_however_late(
    connection: Connection, center: TimeoutCenter
) -> None:
    """Which marks the result; Celery sets the property, too"""
    publish(connection, Queue("mail"), expiration=60, headers={"expires": "2020-01-01T00:00:00"})
    time_passes(center, "mail", HOUR)
    assert pop_one(center).expires_us is None


def test_a_queue_of_celerys_that_only_reads_broadcasts_is_no_topic_for_its_ttl(
    connection: Connection, center: TimeoutCenter
) -> None:
    queue = Queue("events", Exchange("ev", "fanout"), auto_delete=True, message_ttl=5)
    queue(connection.default_channel).declare()
    assert center.queues.names() == []
    publish(connection, queue)
    assert center.registry.topic("events").declaration.message_ttl == 5000


# -- what get and scan show of them


def shown(center: TimeoutCenter, id: str) -> list[tuple[Any, ...]]:
    """What get and scan say of a message; both say the same."""
    found = center.get(id, topic="mail")
    scanned = center.scan("mail", where=lambda one: one.id.split("#")[0] == id).messages
    assert sorted(one.token for one in found) == sorted(one.token for one in scanned)
    return [(one.visibility, one.max_lease, one.expiration) for one in found]


def test_a_message_is_found_with_what_holds_for_it_only_in_any_state(center: TimeoutCenter) -> None:
    center.queues.declare("mail", retries=0)
    center.put("mail", "x", b"", visibility=200, max_lease=500.5, expiration=900)
    center.put("mail", "y", b"", delay=HOUR, max_lease=0)
    center.put("mail", "y", b"another", visibility=30)
    center.put_many("mail", [NewMessage("z", b"", delay=HOUR, expiration=1.5), ("plain", b"", 0)])
    assert shown(center, "x") == [(200, 500.5, 900)]
    assert sorted(shown(center, "y"), key=str) == [(30, None, None), (None, 0, None)]
    assert shown(center, "z") == [(None, None, 1.5)]
    [z] = center.get("z")
    assert z.expires_us == z.time_us + 1_500_000
    [plain] = center.get("plain")
    assert (shown(center, "plain"), plain.expires_us) == ([(None, None, None)], None)
    [delivery] = center.pop("mail", ids=["x"]).messages
    [flying] = center.get("x")
    assert flying.state == IN_FLIGHT
    assert flying.expires_us == delivery.expires_us
    assert shown(center, "x") == [(200, 500.5, 900)]
    center.release([delivery])
    assert shown(center, "x") == [(200, 500.5, 900)]
    [delivery] = center.pop("mail", ids=["x"]).messages
    center.reject(delivery, requeue=True)
    assert center.get("x")[0].state == DEAD
    assert shown(center, "x") == [(200, 500.5, 900)]


def test_what_another_message_of_the_same_id_has_left_is_not_shown(center: TimeoutCenter) -> None:
    """An older release has left the token of a message that it acknowledged."""
    topic = center.queues.declare("mail")
    center.put("mail", "x", b"")
    center.client.hset(topic.slot_for("x").tokens, "x", "older.1;v5000~older.2")
    assert shown(center, "x") == [(None, None, None)]
    assert pop_one(center).visibility is None
