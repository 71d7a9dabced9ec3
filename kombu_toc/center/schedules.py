"""Schedules: what fires again and again, as far as Redis knows it.

A schedule is a record, which is text that nobody reads here, and one message that waits for the
next firing. A *change* replaces both together, if nobody has changed the record meanwhile. So
whoever delivers a firing puts the next one, and if two try, one does. What the next one is, the
caller decides: this knows neither crontabs nor Celery.

All schedules of a topic are in its slot 0, which it has whatever its slot count is: a reshard
moves none of them, and on a Cluster a record and its message are on one node.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..client.connection import pipelined
from ..errors import ConfigurationError
from ..model.results import Edition
from ..model.topic import Topic, schedule_place
from ..scripts.call import ScriptCall, load, parts_of, text, texts
from .calls import Context, PutRequest, ScheduleChange, ScheduleFiring
from .core import CenterPart, Core
from .registry import AT_ONCE, names_between

logger = logging.getLogger(__name__)

#: The slot basis of a firing: its CRC-32 is a multiple of every slot count, so it picks slot 0.
SCHEDULE_BASIS = "recurring-2678"

#: Firings that are remembered of a schedule.
REMEMBERED = 20

#: Names that one call reads, and topics that are asked together.
NAMES_PER_CALL = 100
TOPICS_TOGETHER = 100

#: Reads of a page by name, beside one for so many topics.
ROUNDS = 10

#: When a schedule fires next that does not.
NEVER = "+inf"

#: Seconds for which an edition must be unused before a former one may come back.
UNUSED = 600.0

#: Seconds for which a process may put an edition before it says that it goes on.
PUTTING = 30.0

#: Characters of an app's name, or a release.
LONGEST = 200

#: Where the message of the next firing is, by number in a script's reply.
_STATES = ("", "waiting", "in flight", "dead")


class Scheduled(NamedTuple):
    """A schedule as it is kept.

    record: begins with a line that is the id of the message of its next firing, or empty
    next_us: when it fires next, in microseconds since the epoch; None: never
    template: what its firings are made of; empty if it was not asked for
    fired: lines of its latest firings, the latest first; empty if they were not asked for
    state: where the message of the next firing is: a state, or empty if there is none
    in_flight: ids in flight of those lines
    """

    topic: str
    name: str
    record: str
    next_us: int | None
    template: bytes
    fired: tuple[str, ...]
    state: str
    in_flight: tuple[str, ...]


class ScheduledByName(NamedTuple):
    """Some schedules by topic and name.

    behind: the topic and the name behind which it goes on; without a name, behind all of that
        topic. None: everything was read
    """

    schedules: list[Scheduled]
    behind: tuple[str, str] | None


class ScheduleChanged(NamedTuple):
    """What became of a change.

    done: whether the record was the one that was read; if not, nothing is changed
    record: the one that stands now
    """

    done: bool
    record: str
    now_us: int
    put: bool
    taken_out: bool


class ScheduleOutlook(NamedTuple):
    """How the schedules of a topic stand.

    schedules, active: how many there are, and how many of them fire again; the others are paused or
        have ended
    late: how many of them should have fired already
    next: seconds until the next one fires, negative if it is late; None if none does
    """

    topic: str
    schedules: int
    active: int
    late: int
    next: float | None


# -- the calls: arguments in, a :class:`ScriptCall` out. All keys are of a topic's slot 0


def changing(context: Context, topic: Topic, change: ScheduleChange) -> ScriptCall:
    """Change a schedule. Result: :class:`ScheduleChanged`."""
    slot = topic.slot(0)
    put = change.put or ScheduleFiring("", b"", 0)
    like = change.more[0] if change.more else put
    # On a Cluster, what counts the whole queue has one slot.
    said = topic.declaration
    whole = bool(said.rate or said.concurrency) and not context.clustered
    return context.announcing(
        topic,
        "recur",
        (
            *(slot.announced_times, slot.body, slot.tokens, slot.reasons),
            *(*slot.of_schedules(), *slot.stores),
        ),
        (
            len(topic.steps),
            slot.number,
            change.name,
            change.record,
            change.wanted,
            change.template,
            NEVER if change.next_us is None else change.next_us,
            change.take_out,
            put.id,
            put.body,
            put.at_us,
            topic.step_index(like.priority),
            like.traits,
            "".join(f"{line}\n" for line in change.fired),
            REMEMBERED,
            int(change.replaces),
            int(whole),
            *(part for one in change.more for part in (one.id, one.body, one.at_us)),
        ),
        lambda raw: ScheduleChanged(
            *(bool(raw[0]), change.wanted if raw[0] else text(raw[1]), raw[2]),
            *(bool(raw[3]), bool(raw[4])),
        ),
        keys_recur=True,
    )


def reading(
    topic: Topic,
    rest: Iterable[str],
    *,
    limit: int = 0,
    template: bool = False,
    fired: bool = False,
) -> ScriptCall:
    """Read schedules. Result: the server's clock in microseconds, a list of
    :class:`Scheduled`, and when a schedule of the topic was changed last.

    rest: their names; with a limit, where it begins and how long ago they were to fire, or the
        name behind which they are read by name
    limit: how many of a page
    """
    slot = topic.slot(0)

    def parse(raw: list[Any]) -> tuple[int, list[Scheduled], int]:
        now, changed, *rows = raw
        schedules = [
            Scheduled(
                *(topic.name, text(name), text(record)),
                None if at in (b"inf", b"") else int(float(at)),
                *(template, tuple(text(lines).split("\n")[:-1])),
                *(_STATES[state], tuple(texts(in_flight))),
            )
            for name, at, record, template, lines, state, in_flight in rows
        ]
        return int(now), schedules, int(float(changed or 0))

    return ScriptCall(
        load("recurring"),
        (*slot.of_schedules(), slot.prepare, slot.dead, *slot.stores),
        (len(topic.steps), int(template), int(fired), limit, *rest),
        parse,
    )


def recheck(topic: Topic, names: Sequence[str], behind: int = 0) -> ScriptCall:
    """Have schedules looked at whose next firing is gone: those of these names, or a page of
    all. Result: how many were read, and the names of those."""
    slot = topic.slot(0)
    return ScriptCall(
        load("recheck"),
        (slot.schedules, slot.coming, slot.body),
        (0 if names else NAMES_PER_CALL, behind, *names),
        lambda raw: (raw[0], texts(raw[1:])),
    )


def outlook(topic: Topic, late_us: int) -> ScriptCall:
    """Tell how they stand. Result: :class:`ScheduleOutlook`."""

    def parse(raw: list[Any]) -> ScheduleOutlook:
        now, schedules, active, late, first = raw
        left = None if first == b"" else (float(first) - now) / 1_000_000
        return ScheduleOutlook(topic.name, schedules, active, late, left)

    return ScriptCall(load("outlook"), (topic.slot(0).coming,), (late_us,), parse)


class Recurring(CenterPart):
    """The schedules of topics. What a method costs follows from what it returns, but for
    :meth:`outlook` and :meth:`topics` without a limit: they are about all topics that have
    schedules."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.places = Places(core)

    def count_firings(self, topic: str, fired: int, missed: int) -> None:
        """Count firings that were run, and such that were not."""
        counts = self._context.counts(self._registry.resolved(topic))
        counts.fired += fired
        counts.missed += missed

    def topics(self, *, prefix: str = "", after: str = "", limit: int | None = None) -> list[str]:
        """The topics that have schedules, by name: all of them unless something is said.

        prefix: only those that begin with it
        after: only those behind this name
        limit: how many at most; with it, a call costs as much as it returns, however many topics
            there are
        """
        return self.places.topics(prefix, after, -1 if limit is None else limit)

    def read(
        self, topic: str, names: Sequence[str], *, template: bool = False, fired: bool = False
    ) -> tuple[int, list[Scheduled]]:
        """Read schedules by name: the server's clock in microseconds, and those that are there."""
        declared = self._registry.resolved(topic)
        us, schedules = 0, []
        for some in parts_of(names, NAMES_PER_CALL):
            us, part, _ = self._runner.run(reading(declared, some, template=template, fired=fired))
            schedules += [one for one in part if one.record]
        return us, schedules

    def find(
        self, name: str, *, template: bool = False, fired: bool = False
    ) -> tuple[int, list[Scheduled]]:
        """Read the schedules of that name, in all topics; as :meth:`read`. Only those are asked in
        which there is one."""
        us, by_name = self.find_many([name], template=template, fired=fired)
        return us, by_name[name]

    def find_many(
        self, names: Sequence[str], *, template: bool = False, fired: bool = False
    ) -> tuple[int, dict[str, list[Scheduled]]]:
        """As :meth:`find`, of several names: the schedules by name. The clock is 0 if there is
        none of any."""
        by_topic: dict[str, list[str]] = defaultdict(list)
        for name, topics in self.places.of(names).items():
            for topic in topics:
                by_topic[topic].append(name)
        self._registry.learn_unknown(list(by_topic))
        wanted = [
            (topic, part)
            for topic, some in by_topic.items()
            for part in parts_of(some, NAMES_PER_CALL)
        ]
        calls = [
            reading(self._registry.resolved(topic), some, template=template, fired=fired)
            for topic, some in wanted
        ]
        by_name: dict[str, list[Scheduled]] = {name: [] for name in names}
        us = 0
        for (topic, _), (now_us, part, _) in zip(wanted, self._runner.run_all(calls), strict=True):
            us = now_us
            for one in part:
                if one.record:
                    by_name[one.name].append(one)
            gone = [one.name for one in part if not one.record]
            if gone:
                self.places.gone(topic, gone)
        return us, by_name

    def by_name(
        self, topics: Sequence[str], limit: int, after: str = "", *, template: bool = False
    ) -> ScheduledByName:
        """Read schedules of some topics, of one after the other, each by name. A bounded number of
        topics is asked together, and only as many as it takes. There may be fewer than the limit,
        and more behind them.

        limit: how many schedules at most
        after: of the first topic, only those behind this name
        """
        schedules: list[Scheduled] = []
        behind: tuple[str, str] | None = None
        start = 0
        for _ in range(ROUNDS + len(topics) // TOPICS_TOGETHER):
            if start >= len(topics) or len(schedules) >= limit:
                break
            together = topics[start : start + TOPICS_TOGETHER]
            part, read, after = self._by_name(together, limit - len(schedules), after, template)
            schedules += part
            start += read
            behind = (topics[start], after) if after else (topics[start - 1], "")
        return ScheduledByName(schedules, behind if start < len(topics) else None)

    def _by_name(
        self, topics: Sequence[str], limit: int, after: str, template: bool
    ) -> tuple[list[Scheduled], int, str]:
        """As :meth:`by_name`, with one read of each topic. Also returns how many topics were read
        whole, and the name up to which the next one was."""
        self._registry.learn_unknown(topics)
        resolved = [self._registry.resolved(topic) for topic in topics]
        sizes = pipelined(
            self._runner.client, [("ZCARD", topic.slot(0).coming) for topic in resolved]
        )
        asked: list[tuple[int, int]] = []
        calls = []
        left, whole = limit, len(topics)
        for number, (topic, size) in enumerate(zip(resolved, sizes, strict=True)):
            if left <= 0:
                whole = number
                break
            if size:
                most = min(left, NAMES_PER_CALL)
                asked.append((number, most))
                call = reading(topic, [after], limit=most, template=template)
                calls.append(call)
                # Of the first one it is not known how many are behind that name.
                left -= 0 if after else size
            else:  # whoever noted it has put none
                self.places.gone(topic.name)
            after = ""
        schedules: list[Scheduled] = []
        for (number, most), (_, part, _) in zip(asked, self._runner.run_all(calls), strict=True):
            schedules += part[: limit - len(schedules)]
            if len(schedules) >= limit or len(part) >= most:  # it may have more
                return schedules, number, schedules[-1].name
        return schedules, whole, ""

    def page(
        self,
        topic: str,
        limit: int,
        after: tuple[str, str] | None = None,
        behind_us: int | None = None,
        *,
        template: bool = False,
    ) -> tuple[int, list[Scheduled], int]:
        """Read schedules, the one that fires next first, those that do not fire last; as
        :func:`reading`. If one was changed last ahead of the clock, the clock was
        set back since.

        after: where the one is behind which it goes on, as :func:`schedule_position` gives it
        behind_us: only those that were to fire so many microseconds ago, or earlier
        """
        rest = [*(after or ("", "")), "" if behind_us is None else str(behind_us)]
        call = reading(self._registry.resolved(topic), rest, limit=limit, template=template)
        page: tuple[int, list[Scheduled], int] = self._runner.run(call)
        return page

    def recheck(self, topic: str, ids: Iterable[str] | None = None) -> list[str]:
        """Messages of a topic were deleted: have the schedules looked at whose next firing was
        among them, and return their names. The process that keeps the topics up puts the firing
        after it.

        ids: of these messages; the id of a firing is the schedule's name, @ and more. None: of all
            that waited
        """
        declared = self._registry.resolved(topic)
        gone: list[str] = []
        if ids is not None:
            names = sorted({name for name, at, _ in (id.rpartition("@") for id in ids) if at})
            for some in parts_of(names, NAMES_PER_CALL):
                gone += self._runner.run(recheck(declared, some))[1]
            return gone
        behind = 0
        while True:
            read, found = self._runner.run(recheck(declared, [], behind))
            gone += found
            behind += read
            if read < NAMES_PER_CALL:
                return gone

    def count(self, topic: str) -> int:
        """How many schedules a topic has."""
        slot = self._registry.resolved(topic).slot(0)
        return int(self._runner.client.zcard(slot.coming))

    def outlook(self, late: float = 5.0) -> list[ScheduleOutlook]:
        """How the schedules of each topic stand, with one short call for each topic.

        late: seconds by which a firing may be late
        """
        topics = [self._registry.resolved(topic) for topic in self.topics()]
        calls = [outlook(topic, int(late * 1_000_000)) for topic in topics]
        found: list[ScheduleOutlook] = self._runner.run_all(calls)
        return found

    def change(self, topic: str, change: ScheduleChange) -> ScheduleChanged:
        """Replace a record, and the message that waits, by others.

        Raises ConfigurationError for a topic that goes away by itself, and ReplicationError as
        :meth:`Runner.run_puts`: then it is changed.
        """
        [changed] = self.change_many(topic, [change])
        return changed

    def change_many(self, topic: str, changes: Sequence[ScheduleChange]) -> list[ScheduleChanged]:
        """As :meth:`change`, of several schedules of a topic, in one round trip; each is a change
        of its own."""
        new = [one.name for one in changes if not one.record]
        if new:
            self._admit(topic, new)
        declared = self._registry.resolved(topic)
        rows = [self._rows(declared, change) for change in changes]
        calls = [changing(self._context, declared, change) for change in changes]
        found, shortage = self._runner.run_each_put(calls)
        done = []
        for change, changed, written in zip(changes, found, rows, strict=True):
            if not isinstance(changed, Exception) and changed.done:
                self._record(topic, change, changed)  # first: nobody else tells it
                done.append(change)
            elif written and self._core.recorder is not None:
                self._core.recorder.withdraw(written)
        self._place(topic, done)
        for changed in found:
            if isinstance(changed, Exception):
                raise changed
        self._runner.send_counters()
        if shortage is not None:
            raise shortage
        return found

    def following(
        self, topic: str, change: ScheduleChange, on_changed: Callable[[ScheduleChanged], Any]
    ) -> ScriptCall:
        """A call that changes a schedule which stays, for a firing that was delivered: it is sent
        before that is acknowledged. `on_changed` is told what becomes of it, in any thread."""
        call = changing(self._context, self._registry.resolved(topic), change)

        def parse(raw: Any) -> None:
            changed = call.parse(raw)
            if changed.done:
                self._record(topic, change, changed)
            on_changed(changed)

        return call._replace(parse=parse)

    def _rows(self, topic: Topic, change: ScheduleChange) -> Sequence[Any]:
        """Write the rows of the further messages of a change: a rebuild puts them back as others.
        That of the next firing comes back with its schedule."""
        if self._core.recorder is None or not change.more:
            return ()
        firings = [
            PutRequest(
                *(one.id, one.body, one.at_us),
                basis=SCHEDULE_BASIS,
                priority=change.more[0].priority,
                traits=change.more[0].traits,
            )
            for one in change.more
        ]
        return self._core.recorder.putting(topic, firings)

    def _record(self, topic: str, change: ScheduleChange, changed: ScheduleChanged) -> None:
        if self._core.recorder is not None:
            self._core.recorder.scheduled(topic, change, changed.now_us)

    def _place(self, topic: str, changes: Sequence[ScheduleChange]) -> None:
        """Schedules were changed: note where they are, of those that are new."""
        new = [one.name for one in changes if not one.record and one.wanted]
        gone = [one.name for one in changes if one.record and not one.wanted]
        if new:
            # If this fails, whoever puts it again notes it.
            self.places.note(topic, new)
        if gone:
            try:
                self.places.gone(topic, gone)
            except (RedisError, OSError) as exc:
                # It is deleted. Whoever looks there next finds that, and takes the place away.
                logger.warning(
                    "schedule %s is deleted, but still noted in queue %s: %r",
                    *(", ".join(gone), topic, exc),
                )

    def _admit(self, topic: str, names: Sequence[str]) -> None:
        """A topic gets its first schedules, as far as is known: look-ups by id find firings."""
        declared = self._registry.agreed(self._registry.topic(topic))
        if declared.declaration.expires:
            raise ConfigurationError(
                f"queue {topic!r} goes away by itself when nobody uses it, and its schedules would "
                "go with it: choose a queue without x-expires that is not exclusive or auto-delete"
            )
        self._registry.admit(declared, None, SCHEDULE_BASIS)
        self.places.note(topic, names)

    # -- which edition of a source's schedules is in force

    def edition(
        self,
        source: str,
        edition: str,
        process: str,
        *,
        what: str = "use",
        release: str = "",
        looked: float = 0.0,
        unused: float = UNUSED,
    ) -> Edition:
        """Say that a process has this edition, and ask what is to be done. A source is an app that
        puts schedules, an edition all that one release of it has to put.

        source: an app's name
        edition: a text that two equal editions share
        process: a name that no other process has
        what: ``use`` asks. ``force`` asks for an edition that is to be put whatever is in force.
            ``renew`` goes on with putting, for another half a minute. ``done`` ends it; it all is
            to be put once more if the verdict is ``put``
        release: of a later release the edition goes before one of an earlier, whoever comes first;
            numbers in it count as numbers. Of one release, the edition that came last is in force
        looked: seconds for which the process has asked
        unused: seconds. If an edition is in force that nobody has used for so long, and the process
            has asked for so long, an earlier edition comes back

        Raises ConfigurationError for a source or a release that is too long or no text.
        """
        for kind, name in (("the name of an app", source), ("a release", release)):
            if not isinstance(name, str) or len(name) > LONGEST:
                raise ConfigurationError(
                    f"{kind} is a text of at most {LONGEST} characters, unlike {name!r:.60}"
                )

        def parse(reply: list[Any]) -> Edition:
            verdict, generation, in_force, its, by, since, busy = reply
            names = (text(in_force), text(its), text(by))
            return Edition(text(verdict), int(generation), *names, since / 1000, busy / 1000)

        keys = (self._context.keys.edition(source), self._context.keys.editions(source))
        milliseconds = (int(seconds * 1000) for seconds in (looked, unused, PUTTING))
        arguments = (what, edition, release, process, *milliseconds)
        answer: Edition = self._runner.run(ScriptCall(load("edition"), keys, arguments, parse))
        return answer


class Places:
    """Where schedules are: the topics that have some, and the topics in which one of a name is.

    The schedules of a topic are on the node of its slot 0, and this is on another one: no script
    changes both. So who creates a schedule notes its place before and after, and who removes the
    last one looks again afterwards. A place of which nothing came is told from others by reading
    the schedule.
    """

    def __init__(self, core: Core) -> None:
        self._client, self._registry = core.runner.client, core.registry
        keys = core.context.keys
        self._topics, self._places = keys.scheduled_names, keys.schedule_places

    def topics(self, prefix: str, after: str, limit: int) -> list[str]:
        """Topics that have schedules and names that begin with a text, behind a name; sorted.

        limit: how many at most; it costs as much as it returns. -1: all
        """
        bounds = names_between(prefix, after)
        return texts(self._client.zrange(self._topics, *bounds, bylex=True, offset=0, num=limit))

    def of(self, names: Sequence[str]) -> dict[str, list[str]]:
        """By name, the topics in which a schedule of that name is, or was about to be."""
        heads = {schedule_place(name): name for name in names}
        found: dict[str, list[str]] = {name: [] for name in names}
        if not names:
            return found
        spans = [names_between(head, "") for head in heads]
        # What is put together often lies together: then one range has all, and little else.
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        most = 2 * len(names) + 8
        read = self._ranges([(low, high)], most)
        if len(read) == most:
            read = self._ranges(spans)
        for place in read:
            head, end, topic = place.partition("\0")
            if (name := heads.get(head + end)) is not None:
                found[name].append(topic)
        return found

    def _ranges(self, spans: Iterable[tuple[bytes, bytes]], most: int = -1) -> list[str]:
        commands = [("ZRANGE", self._places, *span, "BYLEX", "LIMIT", 0, most) for span in spans]
        return [place for some in pipelined(self._client, commands) for place in texts(some)]

    def note(self, topic: str, names: Iterable[str]) -> None:
        """Schedules are about to be created, or have just been."""
        commands: list[tuple[Any, ...]] = [("ZADD", self._topics, 0, topic)]
        if places := [part for name in names for part in (0, schedule_place(name, topic))]:
            commands.append(("ZADD", self._places, *places))
        pipelined(self._client, commands)

    def gone(self, topic: str, names: Iterable[str] = ()) -> None:
        """Schedules of a topic are gone, or were never there. What somebody has put again
        meanwhile is noted again."""
        coming = self._registry.resolved(topic).slot(0).coming
        for some in [*parts_of([*names], AT_ONCE)] or [()]:
            is_empty = not self._client.exists(coming)
            self.remove(topic, some, is_empty=is_empty)
            self._note_again(topic, coming, some, is_empty)

    def remove(self, topic: str, names: Sequence[str], *, is_empty: bool) -> None:
        """Take away what was noted.

        is_empty: the topic has no schedules
        """
        places = [schedule_place(name, topic) for name in names]
        gone = ((self._topics, [topic] * is_empty), (self._places, places))
        pipelined(self._client, [("ZREM", key, *some) for key, some in gone if some])

    def _note_again(self, topic: str, coming: str, names: Sequence[str], was_empty: bool) -> None:
        if not names and not was_empty:
            return
        asked = [("EXISTS", coming), *(("ZSCORE", coming, name) for name in names)]
        is_there, *times = pipelined(self._client, asked)
        again = [name for name, at in zip(names, times, strict=True) if at is not None]
        if again or (was_empty and is_there):
            self.note(topic, again)


def schedule_position(one: Scheduled) -> tuple[str, str]:
    """Where a schedule is in the order of :meth:`Recurring.page`."""
    return NEVER if one.next_us is None else str(one.next_us), one.name
