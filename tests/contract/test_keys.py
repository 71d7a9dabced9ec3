"""The keys of messages: who gives one, where its message lies, and what it keeps."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Producer

from celery_toc import aio
from kombu_toc import Delivery, NewMessage, TimeoutCenter, TraitError, reshard_topic
from kombu_toc.model.topic import slot_of

from ..support.cases import each
from ..support.inspection import check_slots, slot_keys, time_passes
from ..support.loops import in_loop

Connect = Callable[..., Connection]


def pop_all(center: TimeoutCenter, topic: str = "mail") -> dict[str, Delivery]:
    """What is due, by id."""
    return {one.id: one for one in center.pop(topic, 100).messages}


def keys_of(center: TimeoutCenter, topic: str = "mail") -> dict[str, str | None]:
    """The keys of what is due, by id; it is taken, and acknowledged."""
    taken = pop_all(center, topic)
    center.ack(list(taken.values()))
    return {id: one.key for id, one in taken.items()}


def publish(connection: Connection, body: Any, queue: str = "mail", **options: Any) -> None:
    Producer(connection.default_channel).publish(body, routing_key=queue, **options)


# -- a center's own


KEYS: list[tuple[Any, str | None]] = [
    ("customer-42", "customer-42"),
    ("a b;c,d~e@f!g#h/\u00e9", "a b;c,d~e@f!g#h/\u00e9"),
    (42, "42"),
    (uuid.UUID(int=3), "00000000-0000-0000-0000-000000000003"),
    ("", None),
    (None, None),
    ("v5", "v5"),
]


@pytest.mark.cluster
@pytest.mark.parametrize("way", ["put", "put_many"])
def test_a_message_keeps_the_key_that_it_is_put_with(center: TimeoutCenter, way: str) -> None:
    """And it lies in the slot that the key picks, where it is found by its id."""
    given = {f"m-{n}": key for n, (key, _) in enumerate(KEYS)}
    expected = {f"m-{n}": key for n, (_, key) in enumerate(KEYS)}
    if way == "put_many":
        center.put_many("mail", [NewMessage(id, b"x", key=key) for id, key in given.items()])
    else:
        for id, key in given.items():
            getattr(center, way)("mail", id, b"x", key=key)
    slots = center.queues.describe("mail").slots
    for id, key in expected.items():
        [found] = center.get(id)
        assert (found.slot, found.key) == (slot_of(key or id, slots), key)
    assert {found.id: found.key for found in center.scan("mail").messages} == expected
    taken = pop_all(center)
    assert {id: one.key for id, one in taken.items()} == expected
    check_slots(center, "mail")
    center.ack(list(taken.values()))
    assert slot_keys(center.client) == []


@pytest.mark.cluster
def test_a_slot_basis_goes_before_the_key(center: TimeoutCenter) -> None:
    slots = center.registry.topic("mail").slots
    center.put("mail", "one", b"", key="customer", basis="elsewhere")
    center.put_many("mail", [NewMessage("two", b"", key="customer", basis="elsewhere")])
    for id in ("one", "two"):
        [found] = center.get(id)
        assert found.slot == slot_of("elsewhere", slots)
    assert keys_of(center) == {"one": "customer", "two": "customer"}


@pytest.mark.cluster
def test_a_key_stays_with_its_message_through_every_way_back(center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=1, retries=5)
    center.put("mail", "x", b"", key="k 1", visibility=100)
    for back in (
        lambda one: center.release([one]),
        lambda one: center.reject(one, requeue=True),
        lambda one: center.reject(one, requeue=False) and center.dead.requeue("mail"),
        lambda one: time_passes(center, "mail", 200),
    ):
        [one] = center.pop("mail").messages
        assert one.key == "k 1"
        back(one)
    center.pop("mail")
    center.reschedule("x", at=0)
    assert {one.key for one in center.pop("mail").messages} <= {"k 1"}


@pytest.mark.cluster
def test_a_receipt_has_the_key(center: TimeoutCenter) -> None:
    center.put("mail", "x", b"", key="customer-42")
    [one] = center.pop("mail").messages
    assert Delivery.of_receipt(one.receipt).key == "customer-42"
    assert center.ack([one.receipt]) == 1


@each("key", [1.5, True, [], b"\xff"])
def test_what_is_no_key_is_refused_and_nothing_put(center: TimeoutCenter, key: Any) -> None:
    with pytest.raises(TraitError, match="message 'x': the key must be text, a whole number"):
        center.put("mail", "x", b"", key=key)
    with pytest.raises(TraitError, match=r"message 1 \('y'\): the key must be text, a whole"):
        center.put_many("mail", [NewMessage("x", b""), NewMessage("y", b"", key=key)])
    assert center.counts("mail") == (0, 0, 0, 0)


# -- a sender's


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"headers": {"x-key": "c-1"}}, "c-1"),
        ({"headers": {"x-key": 7}}, "7"),
        ({"headers": {"x-key": ""}}, None),
        ({"MessageGroupId": "c-2"}, "c-2"),
        ({"headers": {"MessageGroupId": "c-3"}}, "c-3"),
        ({"headers": {"x-key": "c-4"}, "MessageGroupId": "c-5"}, "c-4"),
        ({"headers": {"tenant": "c-6"}}, "c-6"),
        ({"headers": {"tenant": "c-6"}, "MessageGroupId": "c-7"}, "c-7"),
        ({"headers": {"tenant": "c-6", "x-key": "c-8"}}, "c-8"),
        ({"headers": {"other": "c-9"}}, None),
        ({}, None),
    ],
    ids=str,
)
def test_a_header_or_a_message_group_is_the_key_of_a_message(
    connection: Connection, center: TimeoutCenter, options: dict[str, Any], key: str | None
) -> None:
    center.queues.declare("mail", key_header="tenant")
    headers = {"id": "m", **options.pop("headers", {})}
    publish(connection, "x", headers=headers, **options)
    [found] = center.get("m")
    assert found.slot == slot_of(key or "m", 8)
    message = connection.default_channel.basic_get("mail")
    # Celery sends headers along with a retry, and no properties.
    copied = {"x-key": key} if key and "MessageGroupId" in {**headers, **options} else {}
    assert message.headers == {**headers, **copied}
    message.reject(requeue=True)
    connection.default_channel.close()
    assert keys_of(center) == {"m": key}


def test_a_header_is_no_key_where_the_queue_does_not_name_it(
    connection: Connection, center: TimeoutCenter
) -> None:
    publish(connection, "x", headers={"id": "m", "tenant": "c"})
    assert keys_of(center) == {"m": None}


def test_a_publish_with_a_key_that_is_none_sends_nothing(
    connection: Connection, center: TimeoutCenter
) -> None:
    with pytest.raises(TraitError, match="message m: the key must be text, a whole number or a"):
        publish(connection, "x", headers={"id": "m", "x-key": [1]})
    assert center.counts("mail") == (0, 0, 0, 0)


@pytest.mark.one_server("messages are not moved between the slots of a Cluster")
def test_the_key_still_picks_the_slot_when_a_topic_is_resharded(
    connection: Connection, center: TimeoutCenter
) -> None:
    center.queues.declare("mail", slots=1, key_header="tenant")
    for n in range(20):
        publish(connection, "x", headers={"id": f"h-{n}", "tenant": f"t-{n}", "x-delay": 10**7})
        publish(connection, "x", headers={"id": f"k-{n}", "x-key": n, "x-delay": 10**7})
    reshard_topic(center, "mail", 8, settle=0)
    for n in range(20):
        for id, key in ((f"h-{n}", f"t-{n}"), (f"k-{n}", f"{n}")):
            [found] = center.get(id)
            assert found.slot == slot_of(key, 8)
            center.run_now(id)
    assert keys_of(center)["k-7"] == "7"


# -- Celery's


@pytest.mark.cluster
@each(
    "options",
    [
        {"headers": {"x-key": "c-%d"}},
        {"MessageGroupId": "c-%d"},
        {"headers": {"tenant": "c-%d", "more": 1}},
        {"headers": {"x-key": "c-%d"}, "countdown": 0.001},
    ],
    ids=str,
)
@each("asynchronous", [False, True], ids=["apply_async", "aio.send"])
def test_a_task_has_the_key_that_it_is_sent_with(
    app: Celery, center: TimeoutCenter, options: dict[str, Any], asynchronous: bool
) -> None:
    """Also where messages are made quickly, each with its own."""
    center.queues.declare("celery", key_header="tenant")
    remind = app.tasks["shop.remind"]

    def of(number: int) -> dict[str, Any]:
        def filled(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: filled(inner) for name, inner in value.items()}
            return value % number if isinstance(value, str) else value

        return {"task_id": f"t-{number}", **filled(options)}

    async def send() -> None:
        for number in range(6):
            await aio.send(remind.s(number), **of(number))
        await aio.aclose(app)

    if asynchronous:
        in_loop(send())
    else:
        for number in range(6):
            remind.apply_async((number,), **of(number))
    for number in range(6):
        [found] = center.get(f"t-{number}")
        assert found.slot == slot_of(f"c-{number}", 8)
    seen: dict[str, str | None] = {}
    while len(seen) < 6:
        seen |= keys_of(center, "celery")
    assert seen == {f"t-{number}": f"c-{number}" for number in range(6)}


async def test_a_header_of_celerys_may_name_the_key(app: Celery, center: TimeoutCenter) -> None:
    center.queues.declare("celery", key_header="task")
    remind = app.tasks["shop.remind"]

    for number in range(5):
        await aio.send(remind.s(number), task_id=f"t-{number}")
    await aio.aclose(app)
    assert set(keys_of(center, "celery").values()) == {"shop.remind"}
