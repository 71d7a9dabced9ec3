"""The center against a model of it in plain Python, over sequences of operations that nobody
thought of (A3 to A7, A8, Y2, Y3, D2, D3, D5, D6).

Nothing sleeps: time passes by making everything in Redis older. What waits is put an hour ahead;
after an hour it is due, and every lease has ended.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kombu_toc import DEAD, IN_FLIGHT, WAITING, Counts, Delivery, NewMessage, Popped, TimeoutCenter
from kombu_toc.model import scores
from kombu_toc.model.delivery import trait
from kombu_toc.model.topic import base_of

from ..support.cases import night
from ..support.inspection import aged, birth_of, check_slots, now_us, older, residue, time_passes

TOPIC = "model"
SLOTS, RETRIES = 2, 2
HOUR = 3600.0

ids = st.sampled_from("abcd")
bodies = st.sampled_from([b"1", b"2", b"3"])
priorities = st.sampled_from([0, 3, 9])
flags = st.booleans()
numbers = st.integers(0, 1000)


class Traits(NamedTuple):
    """What holds for one message only, in seconds."""

    visibility: float | None = None
    max_lease: float | None = None
    expiration: float | None = None


NO_TRAITS = Traits()

#: None that ends within the run of a test; mostly there are none.
traits = st.one_of(
    st.just(NO_TRAITS),
    st.builds(
        Traits,
        st.sampled_from([None, 1.5 * HOUR]),
        st.sampled_from([None, 0, 0.5 * HOUR, 1.5 * HOUR]),
        st.sampled_from([None, 0.5 * HOUR, 1.5 * HOUR]),
    ),
)

something_lives = precondition(lambda self: self.live)
something_was_delivered = precondition(lambda self: self.seen)


@dataclass
class Modelled:
    """What the model knows of a live message."""

    body: bytes
    step: int
    due: bool
    state: str = WAITING
    left: int | None = None  #: retries, once it was tried
    lease: float = 0.0  #: the model's time when its lease ends
    traits: Traits = NO_TRAITS
    due_at: float = 0.0  #: the model's time when it becomes due, as it was given
    expires: float | None = None  #: the model's time when it expires, once it was delivered
    ends: float | None = None  #: the model's time when its delivery ends although it is renewed
    error: str = ""  #: the last one
    birth: str = ""  #: what tells it from others of its id, once it was delivered
    number: int = 0  #: the higher, the newer
    moved: bool = False  #: it was given another time
    requeues: int | None = None  #: on purpose; None: no consumer that had it has given it back
    holder: str = ""  #: what tells its latest delivery from the others


class Machine(RuleBasedStateMachine):
    client = None  # set by the test

    def __init__(self):
        super().__init__()
        self.client.flushall()
        self.center = TimeoutCenter(self.client, grace=0)
        #: what has a receipt asks this one, which delivers nothing
        self.other = TimeoutCenter(self.client, grace=0)
        #: seconds by which everything was made older
        self.clock = 0.0
        self.ttl: float | None = None
        self.to_dead = True
        self.live: dict[str, Modelled] = {}
        self.number = 0
        #: id and token of what was put with one
        self.puts: set[tuple[str, str]] = set()
        self.seen: list[Delivery] = []
        self.births: set[tuple[str, str]] = set()
        #: id and birth of a message that was delivered -> what it has of its own; what one call
        #: delivered has one birth
        self.own: dict[tuple[str, str], Traits] = {}

    def sharing(self, id: str) -> list[str]:
        """The live ids that a lookup of `id` finds."""
        copies = [other for other in self.live if other.startswith(f"{id}#")]
        # Not by name, which is another one in each run.
        copies.sort(key=lambda copy: self.live[copy].number)
        return [id, *copies] if id in self.live else copies

    def fail(self, id: str) -> str:
        """A delivery failed: one retry less, or dead."""
        message = self.live[id]
        left = RETRIES if message.left is None else message.left
        if left:
            message.state, message.left, message.due = WAITING, left - 1, True
        else:
            message.state = DEAD
        return message.state

    def message_of(self, delivery: Delivery) -> Modelled | None:
        """The message that was delivered, if it lives: not one that has its id since."""
        message = self.live.get(delivery.id)
        return message if message is not None and message.birth == birth_of(delivery) else None

    def holds(self, delivery: Delivery) -> bool:
        """Whether the message is still in flight by this delivery, and by no later one."""
        message = self.message_of(delivery)
        if message is None or message.state != IN_FLIGHT:
            return False
        return message.holder == delivery.birth

    def pick(self, number: int) -> Delivery:
        """One of the deliveries so far, also of a message that is long gone."""
        return self.seen[-1 - number % min(len(self.seen), 12)]

    def given(self, batch: list[Delivery], receipts: bool) -> tuple[TimeoutCenter, list]:
        """A center, and what it is given: messages, or their receipts every other time."""
        if not receipts:
            return self.center, batch
        return self.other, [d if at % 2 else d.receipt for at, d in enumerate(batch)]

    # -- operations

    @initialize(
        puts=st.lists(st.tuples(ids, bodies, flags, priorities, traits), min_size=2, max_size=6),
        ttl=st.sampled_from([None, None, HOUR / 2, 1.5 * HOUR]),
        to_dead=flags,
    )
    def begin(self, puts, ttl, to_dead):
        self.ttl, self.to_dead = ttl, to_dead
        self.topic = self.center.queues.declare(
            TOPIC,
            slots=SLOTS,
            retries=RETRIES,
            message_ttl=None if ttl is None else int(ttl * 1000),
            dead_expired=to_dead,
        )
        for one in puts:
            self.put(*one, "add", None)

    @rule(
        id=ids,
        body=bodies,
        later=flags,
        priority=priorities,
        own=traits,
        if_exists=st.sampled_from(["add", "add", "keep", "replace"]),
        token=st.sampled_from([None, None, None, "t", "u"]),
    )
    def put(self, id, body, later, priority, own, if_exists, token):
        sharing = self.sharing(id)
        expected, replaced = "added", None
        if token is not None and (id, token) in self.puts:
            expected = "repeated"
        elif if_exists == "keep" and sharing:
            expected = "kept"
        elif if_exists == "replace":
            replaced = self.newest([one for one in sharing if self.live[one].state == WAITING])
            expected = "added" if replaced is None else "replaced"
        made = self.center.put(
            TOPIC,
            id,
            body,
            delay=HOUR if later else None,
            priority=priority,
            if_exists=if_exists,
            token=token,
            **own._asdict(),
        )
        assert made.outcome == expected
        if expected == "kept":
            assert made.id in sharing
        if expected not in ("added", "replaced"):
            return
        if token is not None:
            self.puts.add((id, token))
        if replaced is not None:
            left = {found.id: found.body for found in self.center.get(id, topic=TOPIC)}
            gone = {one for one in replaced if one not in left or one == made.id}
            assert len(gone) == 1
            del self.live[gone.pop()]
        self.added(made.id, id, body, priority, later, own)

    def newest(self, ids: list[str]) -> set[str] | None:
        """Of some that wait, those that may be the newest: of a copy and the message of the id
        itself, that is not known if that was tried or moved, or if their priorities differ."""
        if not ids:
            return None
        copies = [one for one in ids if "#" in one]
        latest = max(copies, key=lambda one: self.live[one].number, default=None)
        plain = next((one for one in ids if "#" not in one), None)
        if plain is None or latest is None:
            return {latest or plain}
        older, newer = sorted((plain, latest), key=lambda one: self.live[one].number)
        message, other = self.live[plain], self.live[latest]
        if newer == latest and not (message.birth or message.moved):
            return {newer}
        if newer == plain and not (message.birth or message.step != other.step):
            return {newer}
        return {older, newer}

    def added(
        self, kept: str, id: str, body: bytes, priority: int, later: bool, own: Traits
    ) -> None:
        """A message was added, under its id if no live one has that."""
        assert kept == id if id not in self.live else re.fullmatch(rf"{id}#[0-9a-f]{{16}}", kept)
        assert kept not in self.live
        id = kept
        self.number += 1
        self.live[id] = Modelled(body, self.topic.step_index(priority), not later, traits=own)
        self.live[id].due_at = self.clock + (HOUR if later else 0)
        self.live[id].number = self.number

    @rule(puts=st.lists(st.tuples(ids, bodies, flags, priorities, traits), max_size=5))
    def put_many(self, puts):
        """As if they were put one by one."""
        answers = self.center.put_many(
            TOPIC,
            [
                NewMessage(
                    id, body, delay=HOUR if later else None, priority=priority, **own._asdict()
                )
                for id, body, later, priority, own in puts
            ],
        )
        # What has an id that an earlier one has is put after the others.
        pairs = sorted(zip(puts, answers, strict=True), key=lambda pair: "#" in pair[1].id)
        for (id, body, later, priority, own), answer in pairs:
            assert answer.added
            self.added(answer.id, id, body, priority, later, own)

    @something_was_delivered
    @rule(number=numbers, later=flags, priority=priorities)
    def put_again_and_ack(self, number, later, priority):
        """As a handler does that wants its job to come back."""
        delivery = self.pick(number)
        id, there = base_of(delivery.id), self.message_of(delivery)
        made = self.center.put(
            TOPIC, id, delivery.body, delay=HOUR if later else None, priority=priority
        )
        assert made.added
        self.added(made.id, id, delivery.body, priority, later, NO_TRAITS)
        assert self.center.ack([delivery]) == (there is not None)
        if there is not None:
            del self.live[delivery.id]

    @rule(limit=st.integers(1, 5), recover=flags)
    def wait(self, limit, recover):
        """Of two topics, of which one is always empty; and what was announced still is after it."""
        popped = self.center.pop(["empty", TOPIC], limit, wait=0.02, recover=100 if recover else 0)
        self.recovered(popped, range(SLOTS) if recover else ())
        overdue = self.overdue()
        self.expired(popped)
        due = {id for id in self.live if self.waits(id, early=False)}
        if not overdue:  # else what had expired may have taken the places of others
            # With less than a share for each, topics without one are asked in a second turn.
            assert len(popped.messages) == min(limit, len(due))
            assert popped.more is (len(due) > limit)
        self.delivered(popped, due)

    @rule(limit=st.integers(0, 5), recover=flags)
    def pop(self, limit, recover):
        popped = self.center.pop(TOPIC, limit, recover=100 if recover else 0)
        self.recovered(popped, range(SLOTS) if recover else ())

        self.expired(popped)
        due = {id for id in self.live if self.waits(id, early=False)}
        if popped.expired and popped.more:  # what had expired took the places of others
            assert popped.messages or not limit
        else:
            assert len(popped.messages) == min(limit, len(due))
        # Of what was left it is not known whether it has expired.
        assert popped.more is (len(due) > limit) or popped.expired or self.overdue()
        keys = [(message.step, message.score) for message in popped.messages]
        assert keys == sorted(keys)
        steps = sorted(self.live[id].step for id in due)
        assert [step for step, _ in keys] == steps[: len(keys)]
        self.delivered(popped, due)

    @something_lives
    @rule(
        wanted=st.lists(ids, max_size=3),
        copy=flags,
        early=flags,
        limit=st.one_of(st.none(), st.integers(0, 3)),
        recover=flags,
    )
    def pop_by_id(self, wanted, copy, early, limit, recover):
        if copy and wanted and self.sharing(wanted[0]):
            wanted[0] = self.sharing(wanted[0])[-1]
        popped = self.center.pop(
            TOPIC, limit, ids=wanted, early=early, recover=100 if recover else 0
        )
        # An id with a number sign may be a copy, or have been given so.
        stems = {stem for id in wanted for stem in (id, base_of(id))}
        self.recovered(popped, {self.topic.slot_for(stem).number for stem in stems if recover})
        named = {one for id in wanted for one in self.sharing(id)}
        overdue = self.overdue(early)
        self.expired(popped, early)
        due = {id for id in named & set(self.live) if self.waits(id, early)}
        if limit is None or not overdue:
            assert len(popped.messages) == (len(due) if limit is None else min(limit, len(due)))
            assert popped.more is (limit is not None and len(due) > limit)
        self.delivered(popped, due, early)

    @something_lives
    @rule(body=bodies, early=flags, limit=st.integers(0, 3), look=st.integers(1, 6), recover=flags)
    def pop_matching(self, body, early, limit, look, recover):
        asked = []

        def matches(found):
            asked.append(found.id)
            return found.body == body

        popped = self.center.pop(
            TOPIC, limit, where=matches, early=early, look=look, recover=100 if recover else 0
        )
        self.recovered(popped, range(SLOTS) if recover else ())
        overdue = self.overdue(early)
        every = {id for id in self.live if self.waits(id, early)}
        every |= overdue - {id for id in popped.expired if id not in asked}
        assert len(asked) <= look
        assert set(asked) <= every
        assert popped.more is (len(asked) < len(every))
        steps = sorted(self.live[id].step for id in every)
        assert sorted(self.live[id].step for id in asked) == steps[: len(asked)]
        due = {id for id in asked if self.live[id].body == body and id not in overdue}
        self.expired(popped, early)
        assert {message.id for message in popped.messages} == due
        assert len(due) == limit or not popped.more or len(asked) == look
        self.delivered(popped, due, early)

    def waits(self, id: str, early: bool) -> bool:
        message = self.live[id]
        return (
            message.state == WAITING
            and (message.due or early)
            and not self.expires(message) < self.clock
        )

    def expires(self, message: Modelled) -> float:
        """The model's time when a message expires."""
        if message.expires is not None:
            return message.expires
        lives = [one for one in (message.traits.expiration, self.ttl) if one is not None]
        return message.due_at + min(lives) if lives else float("inf")

    def overdue(self, early: bool = False) -> set[str]:
        """What waits and has expired, as far as it is looked at: what is due, or, early, also what
        has expired while it waits for its back-off."""
        return {
            id
            for id, m in self.live.items()
            if m.state == WAITING and (m.due or early) and self.expires(m) < self.clock
        }

    def expired(self, popped: Popped, early: bool = False) -> None:
        """These were found to have expired."""
        assert set(popped.expired) <= self.overdue(early)
        assert len(set(popped.expired)) == len(popped.expired)
        for id in popped.expired:
            if self.to_dead:
                self.live[id].state = DEAD
            else:
                del self.live[id]

    def slot_of(self, id: str) -> int:
        return self.topic.slot_for(id.partition("#")[0]).number

    def recovered(self, popped: Popped, slots) -> None:
        """The leases that had ended in these slots were rolled back."""
        ended = [
            id
            for id, message in self.live.items()
            if message.state == IN_FLIGHT
            and message.lease <= self.clock
            and self.slot_of(id) in slots
        ]
        back = {id: self.fail(id) for id in ended}
        assert sorted(popped.rolled_back) == sorted(id for id in back if back[id] == WAITING)
        assert sorted(popped.died) == sorted(id for id in back if back[id] == DEAD)
        assert popped.bare == []

    def delivered(self, popped: Popped, due: set[str], early: bool = False) -> None:
        """Of these, what was popped is in flight now."""
        keys = [(message.step, message.score) for message in popped.messages]
        assert keys == sorted(keys)
        for delivery in popped.messages:
            assert delivery.id in due
            message = self.live[delivery.id]
            assert (delivery.body, delivery.step) == (message.body, message.step)
            assert delivery.retries_left == (RETRIES if message.left is None else message.left)
            assert early or scores.action_time(delivery.score) <= popped.now_us
            assert delivery.requeues == (message.requeues or 0)
            given_back = message.requeues is not None
            assert delivery.redelivered is (given_back or delivery.failures > 0)
            message.state = IN_FLIGHT
            own = message.traits
            assert delivery.visibility == own.visibility
            message.lease = self.clock + min(own.visibility or 60, own.max_lease or HOUR * 99)
            message.ends = self.clock + own.max_lease if own.max_lease else None
            assert (delivery.ends_us is None) is (message.ends is None)
            expires = self.expires(message)
            assert (delivery.expires_us is None) is (expires == float("inf"))
            if delivery.expires_us is not None:
                message.expires = expires
                lives = delivery.expires_us / 1e6 - now_us(self.client) / 1e6
                assert abs(lives - (expires - self.clock)) < 600
            if message.birth:
                assert birth_of(delivery) == message.birth
            message.birth = birth_of(delivery)
            self.own[delivery.id, message.birth] = message.traits
            message.holder = delivery.birth
            assert (delivery.id, delivery.birth) not in self.births
            self.births.add((delivery.id, delivery.birth))
        self.seen += popped.messages

    @something_was_delivered
    @rule(picked=st.lists(numbers, max_size=4), receipts=flags)
    def ack(self, picked, receipts):
        batch = [self.pick(number) for number in picked]
        there = {delivery.id for delivery in batch if self.message_of(delivery)}
        center, given = self.given(batch, receipts)
        acked = center.ack(given)
        assert acked == len(there)
        stale = [one for d, one in zip(batch, given, strict=True) if not self.message_of(d)]
        assert sorted(map(repr, acked.stale)) == sorted(map(repr, stale))
        for id in there:
            del self.live[id]

    @something_was_delivered
    @rule(
        number=numbers,
        requeue=flags,
        backoff=flags,
        error=st.sampled_from(["", "e", "f\n"]),
        receipts=flags,
    )
    def reject(self, number, requeue, backoff, error, receipts):
        delivery = self.pick(number)
        center, [given] = self.given([delivery], receipts)
        state = center.reject(given, requeue=requeue, backoff=HOUR if backoff else 0, error=error)
        message = self.message_of(delivery)
        if state is not None and error:
            message.error = error
        if message is None or message.state == DEAD:
            expected = None
        elif requeue and self.holds(delivery):
            expected = self.fail(delivery.id)
            message.due = not backoff
        elif requeue:
            expected = None
        else:
            expected = message.state = DEAD
        assert state == expected

    @something_was_delivered
    @rule(number=numbers, error=st.sampled_from(["", "e"]))
    def bury(self, number, error):
        """What is no longer there is put into DeadQueue; what has its id since stays."""
        delivery = self.pick(number)
        message, kept = self.message_of(delivery), delivery.id
        adds = message is None or message.state != DEAD
        if message is None and kept in self.live and self.live[kept].body != delivery.body:
            kept = f"{base_of(kept)}#{zlib.crc32(delivery.body):08x}"
        if message is None and kept in self.live:
            adds = self.live[kept].body != delivery.body
            if adds:
                kept += f"-{birth_of(delivery)}"
        assert self.center.bury(delivery, reason="failed", error=error) == kept
        if adds:
            if message is None:
                message = self.live[kept] = Modelled(delivery.body, delivery.step, True)
                message.traits = self.own.get((delivery.id, birth_of(delivery)), NO_TRAITS)
            message.state, message.birth, message.ended = DEAD, "", False
            message.requeues = trait(delivery.birth, "r")
            message.error = error or message.error

    @something_was_delivered
    @rule(picked=st.lists(numbers, max_size=4), receipts=flags)
    def release(self, picked, receipts):
        batch = [self.pick(number) for number in picked]
        batch = list({delivery.id: delivery for delivery in batch}.values())
        held = [delivery for delivery in batch if self.holds(delivery)]
        center, given = self.given(batch, receipts)
        released = center.release(given)
        assert released == len(held)
        stale = [one for d, one in zip(batch, given, strict=True) if d not in held]
        assert sorted(map(repr, released.stale)) == sorted(map(repr, stale))
        for delivery in held:
            message = self.live[delivery.id]
            due = scores.action_time(delivery.score) <= now_us(self.client)
            message.state, message.due = WAITING, due
            message.step, message.left = delivery.step, scores.retries_left(delivery.score)

    @something_was_delivered
    @rule(number=numbers)
    def give_back(self, number):
        """As a release, by who has handed it to a consumer."""
        delivery = self.pick(number)
        held = self.holds(delivery)
        [released] = self.center.runner.run_all(
            self.center.commands.release([delivery], handed=True)
        )
        assert released == held
        if held:
            message = self.live[delivery.id]
            message.due = scores.action_time(delivery.score) <= now_us(self.client)
            message.state, message.left = WAITING, scores.retries_left(delivery.score)
            message.requeues = message.requeues or 0

    @something_was_delivered
    @rule(number=numbers)
    def requeue(self, number):
        """On purpose: no retry is spent, also of what has none left. It is due a second later."""
        delivery = self.pick(number)
        call = self.center.commands.reject(delivery, requeue=True, on_purpose=True)
        held = self.holds(delivery)
        assert self.center.runner.run(call) == (WAITING if held else None)
        if held:
            message = self.live[delivery.id]
            message.state, message.due, message.left = WAITING, True, delivery.retries_left
            message.requeues = (message.requeues or 0) + 1
            self.passes(1)

    @something_was_delivered
    @rule(number=numbers, ends=flags, receipts=flags)
    def extend(self, number, ends, receipts):
        delivery = self.pick(number)
        held = self.holds(delivery)
        last = self.live[delivery.id].ends if held else None
        held = held and (last is None or last > self.clock)
        center, given = self.given([delivery], receipts)
        assert center.extend(given, 0 if ends else HOUR) == ([] if held else given)
        if held:
            until = self.clock + (0 if ends else HOUR)
            self.live[delivery.id].lease = until if last is None else min(until, last)

    @something_lives
    @rule()
    def an_hour_passes(self):
        self.passes(HOUR)
        for message in self.live.values():
            if message.state == WAITING:
                message.due = True

    def passes(self, seconds: float) -> None:
        time_passes(self.center, TOPIC, seconds)
        self.clock += seconds
        self.seen = [aged(delivery, seconds) for delivery in self.seen]
        for message in self.live.values():
            message.holder = older(message.holder, seconds)

    @something_lives
    @rule(id=ids, copy=flags, in_flight=flags)
    def cancel(self, id, copy, in_flight):
        sharing = self.sharing(id)
        if copy and sharing:
            id = sharing[-1]
        expected = []
        for one in self.sharing(id):
            state = self.live[one].state
            deleted = in_flight or state != IN_FLIGHT
            expected.append((one, state, deleted))
            if deleted:
                del self.live[one]
        cancelled = self.center.cancel(id, topic=TOPIC, in_flight=in_flight)
        assert sorted((c.id, c.state, c.deleted) for c in cancelled) == sorted(expected)

    @something_lives
    @rule(id=ids, copy=flags, later=flags)
    def reschedule(self, id, copy, later):
        sharing = self.sharing(id)
        if copy and sharing:
            id = sharing[-1]
        expected = [(one, self.live[one].state) for one in self.sharing(id)]
        done = self.center.reschedule(id, topic=TOPIC, delay=HOUR if later else None)
        assert sorted((one.id, one.state) for one in done) == sorted(expected)
        for one in done:
            assert one.moved is (one.state == WAITING)
            if one.moved:
                self.given_time(self.live[one.id], later)

    @something_lives
    @rule(id=ids)
    def get(self, id):
        found = {
            one.id: (one.state, one.step, one.body, one.error, one.reason != "")
            for one in self.center.get(id, topic=TOPIC)
        }
        assert found == {
            id: (one.state, one.step, one.body, one.error, one.state == DEAD)
            for id, one in ((id, self.live[id]) for id in self.sharing(id))
        }

    @something_lives
    @rule(limit=st.integers(1, 4), state=st.sampled_from([None, WAITING, IN_FLIGHT, DEAD]))
    def scan(self, limit, state):
        found, after = [], None
        while True:
            page = self.center.scan(TOPIC, state=state, limit=limit, after=after)
            found += page.messages
            after = page.after
            if after is None:
                break
            assert len(page.messages) == limit
        assert sorted((one.id, one.state, one.step, one.body) for one in found) == sorted(
            (id, one.state, one.step, one.body)
            for id, one in self.live.items()
            if state in (None, one.state)
        )

    @something_lives
    @rule(id=ids, copies=flags, purge=flags, everything=flags)
    def requeue_or_purge_dead(self, id, copies, purge, everything):
        among = list(self.live) if everything else self.sharing(id)
        if not copies:  # by a predicate, which does not take those that share an id
            among = [one for one in among if one == id]
        dead = [one for one in among if one in self.live and self.live[one].state == DEAD]
        operation = self.center.dead.purge if purge else self.center.dead.requeue
        if not copies:
            done = operation(TOPIC, where=lambda one: one.id == id)
        else:
            done = operation(TOPIC, ids=None if everything else [id])
        assert done == len(dead)
        for one in dead:
            if purge:
                del self.live[one]
            else:
                message = self.live[one]
                message.state, message.left = WAITING, RETRIES
                self.given_time(message, later=False)

    def given_time(self, message: Modelled, later: bool) -> None:
        """It was given another time: when it expires is counted anew."""
        message.moved = True
        message.due, message.due_at = not later, self.clock + (HOUR if later else 0)
        message.expires = None
        message.requeues = None if message.requeues is None else 0

    @something_lives
    @rule(picked=st.sets(st.sampled_from(["1", "2", "3"])), in_flight=flags)
    def cancel_found(self, picked, in_flight):
        found = [one for one in self.center.scan(TOPIC).messages if one.body.decode() in picked]
        cancelled = self.center.cancel(found, in_flight=in_flight)
        expected = []
        for one in found:
            state = self.live[one.id].state
            deleted = in_flight or state != IN_FLIGHT
            expected.append((one.id, state, deleted))
            if deleted:
                del self.live[one.id]
        assert sorted((c.id, c.state, c.deleted) for c in cancelled) == sorted(expected)

    @something_lives
    @rule(sure=st.integers(0, 4))
    def purge(self, sure):
        if sure:  # seldom: a full topic is the interesting one
            return
        waiting = [id for id, message in self.live.items() if message.state == WAITING]
        assert self.center.queues.purge(TOPIC) == len(waiting)
        for id in waiting:
            del self.live[id]

    @rule()
    def script_flush(self):
        self.client.script_flush()

    # -- what always holds

    @invariant()
    def every_message_is_in_one_place_with_its_body_and_every_slot_is_announced(self):
        check_slots(self.center, TOPIC)
        assert self.center.admin.check(TOPIC) == []

    @invariant()
    def the_counts_are_right(self):
        states = [(message.state, message.due) for message in self.live.values()]
        assert self.center.counts(TOPIC) == Counts(
            ready=states.count((WAITING, True)),
            scheduled=states.count((WAITING, False)),
            in_flight=sum(state == IN_FLIGHT for state, _ in states),
            dead=sum(state == DEAD for state, _ in states),
        )

    def teardown(self):
        for number, id in enumerate(list(self.live)):
            if number % 2:
                self.center.cancel(id, topic=TOPIC, in_flight=True)
        while messages := self.center.pop(TOPIC, 100).messages:
            self.center.ack(messages)
        self.center.queues.purge(TOPIC)
        for id in self.live:
            self.center.cancel(id, topic=TOPIC, in_flight=True)
        assert residue(self.client) == []


def model_on(client):
    """The class of a model of what is on this server."""

    class OnThisServer(Machine):
        pass

    OnThisServer.client = client
    return OnThisServer


@pytest.mark.parametrize("by_id", [True, False])
def test_what_expires_while_it_waits_for_its_back_off_is_delivered_to_nobody(client, by_id):
    """Not either to who takes what is not due yet."""
    model = model_on(client)()
    own = Traits(expiration=0.5 * HOUR)
    Machine.begin(model, [("a", b"1", False, 0, own)], ttl=None, to_dead=True)
    model.pop(limit=5, recover=False)
    model.an_hour_passes()
    model.reject(0, requeue=True, backoff=True, error="", receipts=False)
    model.pop(limit=5, recover=False)
    if by_id:
        model.pop_by_id(["a"], copy=False, early=True, limit=None, recover=False)
    else:
        model.pop_matching(b"1", early=True, limit=2, look=3, recover=False)
    model.the_counts_are_right()
    assert model.live["a"].state == DEAD
    model.teardown()


@pytest.mark.parametrize("examples", [12, night(60)])
def test_whatever_is_done_in_whatever_order_no_message_is_lost_and_none_left_behind(
    client, examples
):
    """A5: a message is in one place, with its body, until it is acknowledged or deleted"""

    run_state_machine_as_test(
        model_on(client),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,  # a server's pace is not the code's
            # Not Phase.shrink, which takes minutes: add it to see the shortest way to a failure.
            phases=(Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
