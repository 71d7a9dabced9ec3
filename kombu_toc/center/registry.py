"""The declarations of topics: read, written, and remembered for a while."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..client.connection import pipelined
from ..errors import ConfigurationError, PriorityStepsError, ServerError, SlotCountError
from ..model.limits import (
    LIBRARY_TERMS,
    LIMITS,
    NOTIFIER_TERMS,
    PRIORITY_STEPS,
    TERMS,
    WHOLE_QUEUE,
    check_steps,
    same,
)
from ..model.results import Delivery
from ..model.scores import MAX_RETRIES
from ..model.topic import Declaration, Keys, Topic, check_name
from ..scripts.call import ScriptCall, as_bytes, load, text, texts
from .runner import Runner

# -- names in their order, page by page

#: Names that one call reads.
AT_ONCE = 500


def names_between(prefix: str, after: str) -> tuple[bytes, bytes]:
    """Bounds of the names that begin with a text, behind a name, as ZRANGE with BYLEX has them."""
    low = b"(" + as_bytes(after) if after and after >= prefix else b"[" + as_bytes(prefix)
    return low, b"(" + as_bytes(prefix) + b"\xff"  # no name in UTF-8 has this byte


# -- priority steps of topics that are declared already


def agreed(topic: Topic, steps: tuple[int, ...]) -> Topic:
    """The topic. Raises PriorityStepsError if it was declared with others."""
    standing = topic.declaration.steps
    # A topic that expires is used by many who know nothing of each other: replies, events.
    if topic.declaration.altered or topic.declaration.expires:
        return topic
    if standing is None or standing == steps:
        return topic
    raise PriorityStepsError(
        f"queue {topic.name!r} was declared with priority_steps {_listed(standing)}, not "
        f"{_listed(steps)}; set priority_steps to {_listed(standing)}, or leave it out, for "
        "then a queue's own are used; to give it others: "
        f"'celery toc topic set {topic.name} --priority-steps {_listed(steps)}'"
    )


def _listed(steps: Iterable[int]) -> str:
    """Priority steps as a URL has them."""
    return ",".join(map(str, steps))


# -- declarations that contradict the one that stands

#: Warnings that are remembered, lest they are logged again.
MAX_WARNED = 4096

#: What was warned of in this process: the declarations' key, the topic, and what was asked for.
_warned: set[tuple[str, str, str]] = set()

#: Limits that a topic has only if it was declared with them.
_UNLESS_SAID = frozenset((*TERMS, *LIBRARY_TERMS, *NOTIFIER_TERMS))

#: Limits that `declare` answers for by itself.
_ANSWERED = ("slots", "expires")


def warn_of_contradictions(place: str, topic: Topic, asked: Mapping[str, Any]) -> None:
    """Log, once in a process, what a topic was to be declared with and is not.

    place: where its declaration is kept
    asked: limits as :meth:`.registry.Registry.declare` takes them; what is None agrees with any
    """
    # A topic that expires is used by many who know nothing of each other: replies, events.
    if topic.declaration.expires:
        return
    wrong = list(_contradictions(topic, asked))
    if not wrong:
        return
    options = " ".join(f"{option_of(name)} {shown(name, value)}" for name, _, value in wrong)
    key = (place, topic.name, options)
    if key in _warned:
        return
    if len(_warned) >= MAX_WARNED:
        _warned.clear()
    _warned.add(key)
    logger.warning(
        "queue %r was declared with %s, and this process asks for %s: the former stands; "
        "'celery toc topic set %s %s' changes it",
        topic.name,
        ", ".join(f"{name}={shown(name, holds)}" for name, holds, _ in wrong),
        ", ".join(f"{name}={shown(name, value)}" for name, _, value in wrong),
        shlex.quote(topic.name),
        options,
    )


def option_of(limit: str) -> str:
    """The option of ``celery toc topic set`` for a limit."""
    return "--priority-steps" if limit == "steps" else f"--{limit.replace('_', '-')}"


def shown(limit: str, value: Any) -> str:
    """A limit's value as that option takes it."""
    if value is None:
        return "none" if limit in _UNLESS_SAID else "default"
    if limit == "key_weights":
        return ",".join(f"{key}={weight:.15g}" for key, weight in value)
    if limit == "steps":
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _contradictions(topic: Topic, asked: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(limit, what stands, what was asked for)."""
    wanted = Declaration.of(topic.name, **{k: v for k, v in asked.items() if k not in _ANSWERED})
    for name in (*LIMITS, "steps"):
        if name in _ANSWERED or asked.get(name) is None:
            continue
        holds, value = getattr(topic.declaration, name), getattr(wanted, name)
        if name == "steps":
            holds = topic.open_steps
        if not same(name, holds, value):
            yield name, holds, value


# -- the declarations of topics
#
# One rule of freshness: what is remembered of a topic serves as long as it is not older than the
# caller accepts. :meth:`Registry.known` accepts any age and asks nobody, :meth:`Registry.topic` and
# :meth:`Registry.recent` accept five seconds, :meth:`Registry.declared` always reads. Whoever uses
# a topic all the time reads it again along with something else before that: consumers with the
# pauses, producers with a put (:meth:`Registry.rereading`).

logger = logging.getLogger(__name__)

#: Topics whose declarations a center remembers.
MAX_KNOWN = 4096

#: Seconds for which a remembered declaration is used. Another process may have altered or resharded
#: the topic since, or deleted and redeclared it.
RELOAD = 5.0

#: Seconds after which it is read again along with a put, if there is one.
AGING = 2.5


@dataclass(slots=True)
class _Known:
    """A topic that is remembered."""

    topic: Topic
    read_at: float  #: monotonic seconds when its declaration was read
    raw: bytes  #: as it was read


class Registry:
    """The topics of one server and prefix.

    steps: priority steps of topics that are declared here; None leaves the default, and agrees
        with whatever a topic was declared with
    slots: slot count of a topic that is used before anyone has declared it
    retries: of a topic that is declared without
    clock: monotonic seconds
    """

    def __init__(
        self,
        runner: Runner,
        keys: Keys,
        *,
        steps: Sequence[int] | None,
        slots: int,
        retries: int = MAX_RETRIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._client = runner.client
        self._keys = keys
        self.steps = None if steps is None else check_steps(steps)
        self.slots = slots
        self.retries = retries
        self.clock = clock
        #: whether there is a task library
        self.has_library = False
        #: Threads share it. An entry is one reference, so that its fields belong together.
        self._known: dict[str, _Known] = {}
        #: the same, also of what was forgotten to be read again: for when it cannot be read
        self.memory: dict[str, _Known] = {}
        #: bindings that stay, of those that were made here: exchange and binding
        self.bound: set[tuple[str, str]] = set()

    # -- what is remembered

    def topic(self, name: str) -> Topic:
        """The topic of that name; it is declared with the defaults if nobody has done so.

        Its declaration was read at most five seconds ago. One that was deleted meanwhile is
        declared again as it was, unless it goes away by itself.
        """
        known = self._known.get(name)
        if known is None:
            return self.declare(name)
        if self.clock() - known.read_at < RELOAD:
            return known.topic
        raw = self._read(name)
        if raw is not None:
            return self._remember(name, raw)
        return self.declare_again(known.topic)

    def _read(self, name: str) -> bytes | None:
        """A declaration as it is now."""
        read = partial(self._client.hget, self._keys.topics, name)
        raw: bytes | None = self._runner.at_home(
            self._keys.topics, read, partial(self._as_read, name, self.clock())
        )
        return raw

    def _as_read(self, name: str, now: float, error: Exception) -> bytes:
        """A declaration as this process has read it last: while its node is away, nobody can
        change it. Raises the error if it was never read; and, of a topic with limits or an order
        by key, if it was not read shortly before: it may have been resharded in between."""
        known = self._known.get(name) or self.memory.get(name)
        if known is None or (known.topic.declaration.lanes and now - known.read_at > 2 * RELOAD):
            raise error
        return known.raw

    def declare_again(self, topic: Topic) -> Topic:
        """Declare a topic as it was: somebody has deleted it, and who calls this uses it. One that
        goes away by itself is not declared."""
        call = self.declare_again_call(topic)
        if call is not None:
            made: Topic = self._runner.run(call)
            return made
        known = self._known.get(topic.name)
        if known is not None:
            known.read_at = self.clock()
        return topic

    def declare_again_call(self, topic: Topic) -> ScriptCall | None:
        """The call of :meth:`declare_again`; None for a topic that goes away by itself."""
        if topic.declaration.expires and not topic.declaration.kept:
            return None
        return self.declare_call(
            topic.name, replace(topic.declaration, draining_counts=(), previous_counts=())
        )

    def mend(self, name: str) -> None:
        """A message was put into a topic that somebody has deleted, or that was lost with the
        server's memory: declare it again, so that the message is found by its id."""
        known = self._known.get(name)
        if known is not None and self.declare_again_call(known.topic) is not None:
            self.declare_again(known.topic)
        else:
            self.forget(name)

    def rereading(self, name: str) -> ScriptCall | None:
        """The call that reads a declaration, for who sends something else anyway; None if what is
        remembered is young. Result: the topic, or None if somebody has deleted it: then
        :meth:`mend` is next."""
        known = self._known.get(name)
        # On a Cluster it is on another node, which may be away: that is no failure of a put.
        if known is None or self._runner.clustered or self.clock() - known.read_at < AGING:
            return None

        def parse(raw: bytes | None) -> Topic | None:
            return None if raw is None else self._remember(name, raw)

        return ScriptCall(load("admit"), (self._keys.topics,), (name,), parse)

    def recent(self, name: str) -> Topic | None:
        """As :meth:`topic`, but None if nobody has declared it."""
        known = self._known.get(name)
        if known is not None and self.clock() - known.read_at < RELOAD:
            return known.topic
        return self.declared(name)

    def known(self, name: str) -> Topic | None:
        """The topic of that name if this center has used it before, however long ago; asks
        nobody."""
        known = self._known.get(name)
        return None if known is None else known.topic

    def declared(self, name: str) -> Topic | None:
        """The topic of that name as it is declared now; None if nobody has declared it."""
        check_name(name)
        return self.learn(name, self._read(name))

    def learn(self, name: str, raw: bytes | None) -> Topic | None:
        """Remember a topic whose declaration the caller has read; None forgets it."""
        if raw is None:
            self.forget(name)
            self.memory.pop(name, None)
            return None
        return self._remember(name, raw)

    def learn_unknown(self, names: Sequence[str]) -> None:
        """Read the declarations of those topics that are not remembered, together."""
        unknown = [name for name in names if name not in self._known]
        raws = pipelined(self._client, [("HGET", self._keys.topics, name) for name in unknown])
        for name, raw in zip(unknown, raws, strict=True):
            self.learn(name, raw)

    def forget(self, name: str) -> None:
        """Read the topic's declaration again when it is next used."""
        self._known.pop(name, None)

    def standing(self, name: str) -> Topic:
        """The topic of that name as it is declared now; with the defaults if nobody has declared
        it. Declares nothing."""
        return self.declared(name) or self._made(
            name, Declaration(slots=self.slots, retries=self.retries)
        )

    def resolved(self, name: str) -> Topic:
        """As :meth:`known`; a topic that is not remembered is read as by :meth:`standing`."""
        return self.known(name) or self.standing(name)

    def topic_of(self, delivery: Delivery) -> Topic:
        """The topic of a delivery; asks nobody. A topic that is not remembered, because it was
        deleted, is as if it had been declared with the defaults."""
        return self.known(delivery.topic) or self._made(
            delivery.topic, Declaration(slots=self.slots, retries=delivery.limit)
        )

    def select(self, name: str | None) -> list[Topic]:
        """The topic of that name, or all topics if None, as they are declared now; by name."""
        if name is not None:
            self.forget(name)
            return [self.standing(name)]
        declared: dict[bytes, bytes] = self._client.hgetall(self._keys.topics)
        return sorted(
            (self._remember(text(raw_name), raw) for raw_name, raw in declared.items()),
            key=lambda topic: topic.name,
        )

    def far(self, name: str | None) -> list[Topic]:
        """Of the topics that :meth:`select` gives, those of which something may be in the task
        library only."""
        return [topic for topic in self.select(name) if topic.declaration.far]

    def topics(self, *, prefix: str = "", after: str = "", limit: int | None = None) -> list[str]:
        """The names of declared topics, sorted: of all topics unless something is said.

        prefix: only those that begin with it
        after: only those behind this name
        limit: how many at most; with it, a call costs as much as it returns, however many topics
            there are
        """
        if limit is not None:
            bounds = names_between(prefix, after)
            page = self._client.zrange(self._keys.names, *bounds, bylex=True, offset=0, num=limit)
            return texts(page)
        every = sorted(texts(self._client.hkeys(self._keys.topics)))
        return [name for name in every if name > after and name.startswith(prefix)]

    def _remember(self, name: str, raw: bytes) -> Topic:
        known = self._known.get(name)
        if known is not None and known.raw == raw:  # as it is nearly always
            known.read_at = self.clock()
            return known.topic
        try:
            topic = self._made(name, Declaration.from_json(raw))
        except (TypeError, ValueError, LookupError, AttributeError) as exc:
            raise ServerError(
                f"{raw!r:.200} is no declaration of the queue {name!r}: another program has "
                f"written it; correct or remove that field of the key {self._keys.topics!r}"
            ) from exc
        if len(self._known) > MAX_KNOWN:  # reply queues come and go
            self._known.clear()
            self.memory.clear()
        self._known[name] = self.memory[name] = _Known(topic, self.clock(), raw)
        return topic

    def _made(self, name: str, declaration: Declaration) -> Topic:
        steps = declaration.steps or self.steps or PRIORITY_STEPS
        return Topic(name, declaration, self._keys.prefix, steps)

    # -- declaring

    def declare(self, /, name: str, *, kept: int | None = None, **limits: Any) -> Topic:
        """Declare a topic and return it as it is declared.

        kept: of a topic that expires: as :attr:`Declaration.kept`
        limits: ``slots`` (a power of two), ``retries``, ``expires`` (milliseconds), ``steps``, the
            fields of :class:`Limits` (seconds), and what limits starts, keys and puts: ``rate``,
            ``rate_burst``, ``concurrency``, ``key_rate``, ``key_burst``, ``key_concurrency``,
            ``key_order``, ``key_retry``, ``key_fair``, ``key_weights``, ``put_rate``,
            ``key_put_rate``, ``key_header``; ``library``, ``guard`` and ``horizon``
            (docs/library.md); ``target`` (docs/notifier.md). What is left out agrees with any
            declaration.

        The first declaration stands, until :meth:`.topics.Topics.alter` changes it. One that asks
        for other limits is logged, once. Raises SlotCountError if it has another slot count than
        the one asked for, PriorityStepsError if it has other steps than this center or `limits`
        name and nobody has altered these, ConfigurationError if a limit makes no sense.
        """
        check_name(name)
        given = {limit: value for limit, value in limits.items() if value is not None}
        steps = check_steps(given["steps"]) if "steps" in given else self.steps
        self.check_horizon(name, given)
        slots = 1 if self.needs_one_slot(given) else self.slots
        defaults = {"slots": slots, "retries": self.retries}
        said = {**defaults, **given, "steps": steps or PRIORITY_STEPS}
        wanted = replace(Declaration.of(name, **said), bases=False)
        wanted.check_horizon(name)
        if not given.keys().isdisjoint(TERMS):
            wanted.check_gates(name, clustered=self._runner.clustered)
        if wanted.expires:
            wanted = replace(wanted, named=False, kept=kept)
        call = self.declare_call(name, wanted)
        topic: Topic = self._runner.at_home(
            self._keys.topics,
            lambda: self._runner.run(call),
            lambda error: call.parse(self._as_read(name, self.clock(), error)),
        )
        if steps is not None:
            topic = agreed(topic, steps)
        asked = given.get("slots", topic.slots)
        if asked not in (topic.slots, *topic.declaration.previous_counts):
            raise SlotCountError(
                f"queue {name!r} was declared with {topic.slots} slots, not {asked}; "
                f"declare it with {topic.slots}, or change it: "
                f"'celery toc reshard {name} --slots {asked}'"
            )
        own = {} if self.retries == MAX_RETRIES else {"retries": self.retries}
        warn_of_contradictions(self._keys.topics, topic, {**own, **given, "steps": steps})
        return topic

    def check_horizon(self, name: str, limits: Mapping[str, Any]) -> None:
        """Raise ConfigurationError, naming the topic, if it is to have a horizon, and there is no
        task library to keep what is further away."""
        limit = "horizon"
        if limits.get(limit) is not None and not self.has_library:
            raise ConfigurationError(
                f"queue {name!r}: {limit} needs a task library: set toc_library in "
                f"broker_transport_options, or leave {limit} out"
            )

    def needs_one_slot(self, limits: Mapping[str, Any]) -> bool:
        """Whether a topic with these limits has one slot unless more are asked for: on a Cluster,
        if something counts the whole queue."""
        return any(map(limits.get, WHOLE_QUEUE)) and bool(self._runner.clustered)

    def agreed(self, topic: Topic) -> Topic:
        """Return this topic. Raises PriorityStepsError if it was declared with other steps than
        this center was given."""
        return topic if self.steps is None else agreed(topic, self.steps)

    def declare_call(self, name: str, wanted: Declaration) -> ScriptCall:
        """The call that declares a topic. Result: the topic as it is declared."""

        def parse(raw: bytes) -> Topic:
            return self._remember(name, raw)

        return ScriptCall(
            load("declare"),
            (self._keys.topics, self._keys.expiring, self._keys.names),
            (name, wanted.to_json(), wanted.expires or 0),
            parse,
        )

    def redeclare(self, topic: Topic, declaration: Declaration) -> bool:
        """Replace the declaration that `topic` has by another.

        Returns whether it was the topic's declaration until now; if not, somebody else has
        changed it, and nothing is written.
        """
        if declaration == topic.declaration:
            return True
        self.forget(topic.name)
        raw = self._client.hget(self._keys.topics, topic.name)
        if raw is None or Declaration.from_json(raw) != topic.declaration:
            return False
        call = ScriptCall(
            load("redeclare"), (self._keys.topics,), (topic.name, raw, declaration.over(raw)), bool
        )
        replaced: bool = self._runner.run(call)
        return replaced

    def admit(
        self, topic: Topic, id: str | None, basis: str | None, *, unique: bool = False
    ) -> None:
        """To be called before a message is put: look-ups by id that begin after that find it.

        id: None if nobody looks for it by that
        basis: slot basis, if there is one
        unique: whether it has a unique key

        Does nothing but for the first message of its kind, as far as this center knows.
        """
        declaration = topic.declaration
        news = []
        if declaration.bases is False and basis and basis != id:
            news.append("bases")
        if declaration.named is False and id is not None:
            news.append("named")
        if unique and not declaration.unique:
            news.append("unique")
        if news:
            call = ScriptCall(
                load("admit"), (self._keys.topics,), (topic.name, *news), lambda raw: raw
            )
            raw = self._runner.run(call)
            if raw is not None:
                self._remember(topic.name, raw)

    def reach(self, name: str, slot: int) -> Topic | None:
        """The topic as it is declared, changed so that its consumers read this slot.

        For a consumer that has seen an announcement of a slot that the topic no longer has: a
        producer that was suspended, or that kept its messages for long, has not read that the
        topic was resharded.
        """
        topic = self.declared(name)
        if (
            topic is None
            or slot < topic.slot_span
            or not self._client.exists(topic.slot(slot).announced_times)
        ):
            return topic
        draining = tuple(sorted({*topic.declaration.draining_counts, 1 << slot.bit_length()}))
        if self.redeclare(topic, replace(topic.declaration, draining_counts=draining)):
            logger.warning(
                "queue %s: a producer has used slot %d, and it has only %d slots since it was "
                "resharded; 'celery toc reshard %s --slots %d' moves what is there",
                *(name, slot, topic.slots, name, topic.slots),
            )
        return self.declared(name)
