"""The center at the ends of what it allows: the widest topic, the largest batch, any id."""

from __future__ import annotations

import redis

from kombu_toc import DEAD, TimeoutCenter

from ..support.cases import each
from ..support.inspection import check_slots, put_call, residue

#: More than Lua unpacks.
MANY = 8500

IDS = {
    "empty": "",
    "a mark of copies": "#",
    "a copy of nothing": "#a",
    "marks": "a#b#c",
    "half a character": "\ud800",
    "half a character and a mark": "x#\udfff",
    "no text": "\0\n",
    "braces": "}:{x}",
    "long": "x" * 65536,
}


def test_the_widest_topic_is_popped_and_kept_up_by_who_has_just_come(client: redis.Redis) -> None:
    """Who looks at leases does so in all slots and priority steps at once."""
    center = TimeoutCenter(client)
    topic = center.queues.declare("wide", slots=512, steps=range(10))
    for number in range(20):
        center.put("wide", f"{number}", b"", priority=number % 10)
    messages = center.pop("wide", 20).messages
    assert [message.step for message in messages] == sorted([*range(10)] * 2)
    assert any(
        kept.holding for kept in center.runner.run_all(center.leases.look_calls(topic, range(512)))
    )
    assert center.ack(messages) == 20
    assert residue(client) == []


def test_dead_messages_are_dropped_however_many_at_once(center: TimeoutCenter) -> None:
    topic = center.queues.declare("mail", slots=1, dead_limit=1)
    slot = topic.slot(0)
    ids = [f"{number}" for number in range(MANY + 1)]
    for key, value in ((slot.body, "body"), (slot.tokens, "somebody.1"), (slot.reasons, "why\n")):
        center.client.hset(key, mapping=dict.fromkeys(ids, value))
    now_ms = center.client.time()[0] * 1000
    center.client.zadd(slot.dead, {id: now_ms * 1000 + int(id) for id in ids})
    assert len(center.pop("mail", 1, recover=MANY).dropped) == MANY
    [left] = center.scan("mail").messages
    assert (left.id, left.state) == (ids[-1], DEAD)
    check_slots(center, "mail")
    assert center.dead.purge("mail") == 1
    assert residue(center.client) == []


def test_any_number_of_messages_and_copies_is_acknowledged_at_once(center: TimeoutCenter) -> None:
    topic = center.queues.declare("mail", slots=2)
    for start in range(0, MANY, 500):
        ids = [f"{number // 2}" for number in range(start, start + 500)]
        calls = [put_call(center, topic, id, b"%d" % at) for at, id in enumerate(ids)]
        center.runner.run_all(calls)
    messages = center.pop("mail", 2 * MANY).messages
    assert len(messages) == MANY
    assert sum("#" in message.id for message in messages) == MANY / 2
    assert center.ack(messages + messages) == MANY
    assert center.ack(messages) == 0
    assert residue(center.client) == []


@each("id", IDS.values(), ids=IDS)
@each("end", ["ack", "cancel", "purge", "dead ones", "delete", "bare"])
def test_an_id_may_be_any_text(center: TimeoutCenter, id: str, end: str) -> None:
    center.queues.declare("mail", slots=2)
    center.client.script_flush()  # a server that has just been promoted knows no script either
    assert center.put("mail", id, b"first").id == id
    copy = center.put("mail", id, b"second").id
    assert copy.startswith(f"{id}#")
    assert {found.id for found in center.get(id, topic="mail")} == {id, copy}
    assert copy in {found.id for found in center.get(copy, topic="mail")}
    if end in ("purge", "cancel"):
        assert len(center.reschedule(id, topic="mail", delay=3600)) == 2
    if end == "cancel":
        assert [one.deleted for one in center.cancel(copy, topic="mail")] == [True]
        assert [one.deleted for one in center.cancel(id, topic="mail")] == [True]
    elif end == "purge":
        assert center.queues.purge("mail") == 2
    elif end == "delete":
        assert len(center.pop("mail").messages) == 1
        center.queues.delete("mail")
    elif end == "bare":
        for slot in center.registry.topic("mail").all_slots():
            center.client.delete(slot.body)
        assert sorted(center.pop("mail", 2).bare) == sorted([id, copy])
    else:
        messages = center.pop("mail", 2).messages
        center.client.script_flush()
        assert center.extend(messages) == []
        assert center.release(messages) == 2
        messages = center.pop("mail", 2).messages
        assert sorted(message.id for message in messages) == sorted([id, copy])
        if end == "ack":
            assert center.ack(messages) == 2
        else:
            for message in messages:
                assert center.reject(message, requeue=False) == DEAD
            assert center.dead.purge("mail", ids=[copy]) >= 1
            center.dead.purge("mail")
    assert list(center.client.scan_iter("*copies*")) == []
    if end == "delete":
        assert center.queues.names() == []
    else:
        assert center.admin.check("mail") == []
        assert center.counts("mail") == (0, 0, 0, 0)
