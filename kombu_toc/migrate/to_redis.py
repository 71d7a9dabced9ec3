"""Moves the messages of a timeout center into a broker of Kombu's own Redis transport: a rollback.

What waits goes into the lists that Kombu has for a queue and its priorities, in the order of the
action times. Kombu's transport knows no times: it delivers a task with an ``eta`` at once, and
Celery's worker holds it until then. So a task keeps its time as its ``eta``, also if it was
rescheduled or had a delay, and what is no task and is not due stays.

A message is written to the broker first, and then taken from the center: killed in between, it is
in both. So that it is one message when that is repeated, whatever has become of it meanwhile, the
broker remembers what was written until it has gone from the center, or for a week.

Dead letters stay, for Kombu has no place for them; so do messages of queues that expire by
themselves or are bound to a fanout exchange, and what was put without Kombu.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import Any

from kombu import Connection
from kombu.utils.json import dumps

from ..center.exchanges import Bindings
from ..model.results import IN_FLIGHT, WAITING, Cancelled, Found
from ..transport.channel import Channel
from .moving import (
    BATCH,
    REMEMBER,
    Account,
    Broker,
    Migrated,
    Move,
    Progress,
    Unreadable,
    carry_out,
    connected,
    refuse_if_any,
    to_kombu,
)

#: What is told of processes that have said that they consume.
_FORGOTTEN = "; one that was killed is forgotten within a minute"

#: Of the key, after the prefix, that remembers what was written and not yet taken from the center.
_RETURNED = "toc-returned"

# KEYS[1] the queue's list   KEYS[2] what was written and not yet taken from the center
# ARGV[1] message   ARGV[2] its name   ARGV[3] 1: it goes first   ARGV[4] seconds it is remembered
_GIVE = """
if redis.call('SADD', KEYS[2], ARGV[2]) == 0 then return 0 end
redis.call(ARGV[3] == '1' and 'RPUSH' or 'LPUSH', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
"""


def migrate_back(
    source: Connection,
    target: str,
    *,
    options: Mapping[str, Any] | None = None,
    queues: Collection[str] | None = None,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Migrated:
    """Move all messages into a ``redis://`` broker; a second run moves what is there by then.

    source: a connection to the timeout center, with the app's transport options
    target: the broker's URL
    options: the broker's ``broker_transport_options``; `global_keyprefix`, `sep` and
        `priority_steps` count, those of redis-py, and `ssl`
    queues: only these
    dry_run: count, and change nothing
    force: also while somebody consumes from the center; what a consumer has then stays
    progress: called with how many messages have been looked at, and of how many

    Raises ConsumersError if somebody consumes, ConfigurationError for a URL that cannot be used.
    """
    return carry_out(
        source,
        target,
        options,
        lambda channel, broker: _ToRedis(
            channel, broker, Account(queues, dry_run), source.as_uri(), taken=not force
        ),
        dry_run=dry_run,
        force=force,
        progress=progress,
    )


class _ToRedis(Move):
    def __init__(
        self, channel: Channel, broker: Broker, account: Account, shown: str, taken: bool
    ) -> None:
        super().__init__(channel, broker, account)
        self.client: Any = broker.client
        self.shown = shown
        #: whether what consumers have taken is moved, for there are none any more
        self.taken = taken
        self.returned = broker.prefix + _RETURNED
        seconds, us = self.center.client.time()
        self.now_us = seconds * 1_000_000 + us

    def check(self) -> None:
        self.client.ping()

    def check_for_consumers(self) -> None:
        """Raises ConsumersError if somebody consumes from the center."""
        # Also of a worker that is busy, and of no other center on the same server.
        present = {one.name for every in self.center.queues.consumers().values() for one in every}
        refuse_if_any(present, self.shown, "worker", _FORGOTTEN)
        # Workers of a release that does not tell, and Flower.
        client = self.center.client
        db = self.channel.transport.address.db
        found: list[str] = []
        for node in client.primaries() if self.center.clustered else [client]:
            # An idle worker blocks until something is due, and in any case for remote control.
            found += [
                one.get("addr", "?")
                for one in connected(node, self.shown)
                if int(one.get("db", 0)) == db and one.get("cmd") in ("bzpopmin", "xread")
            ]
        refuse_if_any(found, self.shown)

    def run(self, progress: Progress) -> Migrated:
        declared = self.center.queues.names()
        names = [name for name in declared if self.account.is_wanted(name)]
        queues = [name for name in names if not self._is_skipped(name)]
        counts = {name: self.center.counts(name) for name in queues}
        total = sum(one.waiting + one.in_flight for one in counts.values())
        self.account.dead = sum(one.dead for one in counts.values())
        # By a run that was killed: of those that are still there, it will be known again.
        written = {} if self.account.dry_run else self._written(queues)
        done = 0
        progress(0, total)
        for name in queues:
            # What was delivered once goes before what was not, as where Kombu restores it.
            for state in (IN_FLIGHT, WAITING):
                after = None
                while True:
                    page = self.center.scan(name, state=state, limit=BATCH, after=after)
                    for one in page.messages:
                        written.pop(_name(one), None)
                    self._move(name, page.messages, state)
                    done += len(page.messages)
                    progress(done, max(total, done))
                    after = page.after
                    if after is None:
                        break
        self._forget(written)
        return self.account.result((self.account.only or set()).difference(declared))

    def _written(self, queues: Collection[str]) -> dict[str, None]:
        """Names of messages of these queues that a run before this one has written."""
        names = (
            raw.decode("utf-8", "surrogatepass") for raw in self.client.smembers(self.returned)
        )
        return {name: None for name in names if name.partition("\0")[0] in queues}

    def _is_skipped(self, name: str) -> bool:
        topic = self.center.registry.declared(name)
        if topic is None:  # it has gone just now
            return True
        counts = self.center.counts(name)
        if not counts.waiting + counts.in_flight:
            return False
        if topic.declaration.expires:
            self.account.skip(name, "it expires by itself")
            return True
        if name in self._copying:
            self.account.skip(
                name,
                "it is bound to a fanout exchange, of which Kombu's transport keeps no copies",
                counts.waiting + counts.in_flight,
            )
            return True
        return False

    @cached_property
    def _copying(self) -> set[str]:
        """The queues that keep copies of broadcasts."""
        bound = (json.loads(member) for _, member in Bindings(self.center).every())
        return {queue for _, _, queue, kind, *_ in bound if kind == "fanout"}

    def _move(self, queue: str, page: list[Found], state: str) -> None:
        """Write to the broker, then take from the center."""
        if state == IN_FLIGHT:
            if not self.taken:
                for one in page:
                    self._stays(one, "a consumer has it")
                return
            page = page[::-1]  # each goes before the others
        moving = []
        for one in page:
            try:
                moving.append((one, to_kombu(one, self.now_us)))
            except Unreadable as exc:
                self._stays(one, str(exc))
        if not self.account.dry_run and moving:
            self._give(moving)
            found = [one for one, _ in moving]
            gone = self.center.cancel(found, in_flight=self.taken, dead=False)
            self._give_what_was_another(found, gone)
            # What a consumer has taken meanwhile may come back, and has been written already.
            left = {one.id for one in gone if not one.deleted}
            self._forget(_name(one) for one in found if one.id not in left)
        if moving:
            self.account.moved[queue] += len(moving)
        for one, _ in moving:
            if state == IN_FLIGHT:
                self.account.unacknowledged += 1
            elif one.time_us > self.now_us:
                self.account.scheduled += 1

    def _give(self, moving: list[tuple[Found, dict[str, Any]]]) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for one, payload in moving:
                pipe.eval(
                    _GIVE,
                    2,
                    self._list(one.topic, payload),
                    self.returned,
                    dumps(payload),
                    _name(one),
                    int(one.state == IN_FLIGHT),
                    REMEMBER,
                )
            pipe.execute()

    def _give_what_was_another(self, moved: list[Found], gone: list[Cancelled]) -> None:
        """Where somebody consumes all the same, another message may have come under an id
        between the two steps, and be taken from the center for it: it is moved, too."""
        known = {(one.id, one.body) for one in moved}
        for taken in gone:
            if taken.deleted and (taken.id, taken.body) not in known:
                [first, *_] = (one for one in moved if one.id == taken.id)
                other = first._replace(body=taken.body)
                self._give([(other, to_kombu(other, self.now_us))])
                self._forget([_name(other)])

    def _forget(self, names: Iterable[str | bytes]) -> None:
        """These are in the broker, and no longer in the center."""
        every = list(names)
        for start in range(0, len(every), BATCH):
            self.client.srem(self.returned, *every[start : start + BATCH])

    def _list(self, queue: str, payload: dict[str, Any]) -> str:
        """The key of the list for a queue and a priority, as Kombu has it."""
        try:
            priority = max(min(int(payload["properties"]["priority"]), 9), 0)
        except (TypeError, ValueError, KeyError):
            priority = 0
        step = self.broker.steps[bisect(self.broker.steps, priority) - 1]
        return self.broker.prefix + (f"{queue}{self.broker.sep}{step}" if step else queue)

    def _stays(self, one: Found, reason: str) -> None:
        self.account.stays(one.topic, one.id, reason)


def _name(one: Found) -> str:
    """What tells a message from every other of the center."""
    digest = hashlib.sha1(one.body).hexdigest()
    return f"{one.topic}\0{one.id}\0{digest}"
