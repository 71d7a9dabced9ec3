"""The timeout center: messages in Redis that become visible at their action time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import redis
from redis.exceptions import ResponseError

from ..client.connection import pipelined
from ..client.errors import DOCUMENT, explained, is_refused
from ..client.options import Settings
from ..errors import ConfigurationError, NotPermittedError
from ..metrics import Metrics
from ..model.limits import CLUSTER_SLOTS, DEFAULT_SLOTS, LIMITS, Limits, Number
from ..model.scores import MAX_RETRIES
from ..model.topic import Keys
from ..scripts.call import ScriptCall, commands_of, load, parts_of, texts
from .calls import POP_BYTES, Commands, Context, add_counters
from .consumption import Loops
from .core import Core, Recorder, SharedNotes, TaskLibrary
from .failures import Failures
from .messages import Dead, Messages
from .pop import Deliveries
from .put import Puts
from .registry import Registry
from .runner import Runner
from .schedules import Recurring
from .topics import Expiring, Queues
from .upkeep import Admin, Leases

# -- the verbs of a message, which the parts have

P = ParamSpec("P")
R = TypeVar("R")


class Delegate(Generic[P, R]):
    """A method that a part has: ``get = Delegate("messages", Messages.get)``.

    Of an instance it is the bound method of that part, so that a call costs no further layer; of
    the class it is the part's function, with its signature and docstring.
    """

    def __init__(self, part: str, method: Callable[Concatenate[Any, P], R]) -> None:
        self._part = part
        self._name = method.__name__
        self._method = method

    @overload
    def __get__(self, facade: None, owner: type) -> Callable[Concatenate[Any, P], R]: ...

    @overload
    def __get__(self, facade: object, owner: type) -> Callable[P, R]: ...

    def __get__(self, facade: object | None, owner: type) -> Callable[..., R]:
        if facade is None:
            return self._method
        bound: Callable[P, R] = getattr(getattr(facade, self._part), self._name)
        return bound


# -- the timeout center
#
# Plain redis-py; nothing of Kombu and nothing of Celery. Bodies are bytes that the center does
# not look into::
#
#     center = TimeoutCenter(redis.Redis())
#     center.put("mail", "order-7", b"remind", delay=3600)
#     for message in center.pop("mail", limit=10).messages:
#         ...
#         center.ack([message])
#
# The verbs of a message stand on the center; everything else is a method of one of its parts, such
# as ``center.queues.declare("mail", slots=16)``.
#
# Every operation is one script (``scripts/``), atomic, by Redis's own clock. Operations are first
# built as a :class:`ScriptCall` and then run, so that the transport can send many at once over a
# connection of its own without waiting for each reply.

#: What the options may be that are numbers.
_OPTIONS = {
    "slots": LIMITS["slots"],
    "retries": LIMITS["retries"],
    "wait_replicas": Number(int, 0),
    "wait_timeout": Number(float, 0, unit="seconds"),
    "pop_bytes": Number(int, 1),
    "grace": Number(float, 0, unit="seconds"),
}


def _check(client: Any, prefix: object, limits: object, metrics: object) -> None:
    """Raise ConfigurationError, naming the argument, for what cannot be meant."""
    kind = type(client)
    if kind.__module__.startswith("redis.asyncio"):
        raise ConfigurationError("a client of redis.asyncio is for AsyncTimeoutCenter")
    if not hasattr(client, "get_encoder") or not hasattr(client, "pipeline"):
        # A URL may have a password, and is not told.
        raise ConfigurationError(
            f"client must be a client of redis-py, such as redis.Redis(), not a {kind.__name__}: "
            "TimeoutCenter.from_url takes a URL"
        )
    if not isinstance(prefix, str):
        raise ConfigurationError(f"prefix must be a str, such as 'toc:', not {prefix!r:.100}")
    if not isinstance(limits, Limits):
        raise ConfigurationError(
            f"limits must be kombu_toc.Limits(visibility=30) or the like, not {limits!r:.100}"
        )
    if not isinstance(metrics, (Metrics, type(None))):
        raise ConfigurationError(f"metrics must be kombu_toc.Metrics(), not {metrics!r:.100}")


class TimeoutCenter:
    """The operations on topics.

    client: a redis-py client that returns bytes (``decode_responses=False``)
    prefix: what every key begins with
    steps: priority steps of topics that this center declares; None leaves the default, and
        agrees with whatever a topic was declared with
    slots: slot count of a topic that is declared without one; 1 unless given, 8 on a Cluster
    retries: redeliveries of a message, in topics that are declared without a number
    limits: hold for topics whose declarations do not say
    wait_replicas: how many replicas must have a message before its put returns
    wait_timeout: seconds that a put waits for them
    metrics: where to count what happens; the center has its own unless given
    pop_bytes: bytes that the bodies of one pop may have together; the first may have any
    grace: seconds for which a center must have watched the server before it rolls back leases that
        have ended: the server may have been away, or its clock set, and their holders be about to
        renew them. A third of the visibility timeout unless given, but at least two seconds and at
        most fifteen; 0 if the caller knows better

    queues: declares, alters, describes, counts, pauses, purges and deletes queues
    dead: requeues and purges dead messages
    failures: lists, retries and deletes the latest failed tasks
    admin: checks and repairs queues
    recurring: messages that are put again and again
    library: the task library, if there is one

    The other parts are for code that batches calls: `registry` remembers declarations, `commands`
    builds calls, and `runner` runs them.
    """

    #: The parts that users need.
    PARTS = ("queues", "dead", "failures", "admin")

    def __init__(
        self,
        client: Any,
        prefix: str = "toc:",
        *,
        steps: Sequence[int] | None = None,
        slots: int | None = None,
        retries: int = MAX_RETRIES,
        limits: Limits = Limits(),  # noqa: B008 - it is immutable
        wait_replicas: int = 0,
        wait_timeout: float = 1.0,
        metrics: Metrics | None = None,
        pop_bytes: int = POP_BYTES,
        grace: float | None = None,
    ) -> None:
        _check(client, prefix, limits, metrics)
        # As _OPTIONS has them; what is None there is not said.
        fewest = 1 if slots is None else slots
        least = 0 if grace is None else grace
        said = (fewest, retries, wait_replicas, wait_timeout, pop_bytes, least)
        for (name, kind), value in zip(_OPTIONS.items(), said, strict=True):
            kind.check(name, value)
        self.client = client
        self.keys = keys = Keys(prefix)
        self.metrics = metrics or Metrics()
        self.runner = runner = Runner(
            client,
            self.metrics,
            partial(add_counters, keys),
            wait_replicas=wait_replicas,
            wait_timeout=wait_timeout,
        )
        self.clustered = runner.clustered
        slots = slots or (CLUSTER_SLOTS if runner.clustered else DEFAULT_SLOTS)
        self.context = context = Context(
            keys, runner.clustered, limits.checked("limits"), pop_bytes, self.metrics.counts
        )
        self.registry = registry = Registry(runner, keys, steps=steps, slots=slots, retries=retries)
        self.commands = Commands(context, registry.topic_of)
        self.core = core = Core(runner, registry, context, self.commands)
        self.expiring = Expiring(core)
        self.leases = Leases(core, grace=grace)
        self.recurring = Recurring(core)
        self.messages = Messages(core, self.recurring)
        self.puts = Puts(core, self.messages, self.leases)
        self.deliveries = Deliveries(core, self.leases, self.messages)
        self.loops = Loops(core, self.deliveries)
        self.dead = Dead(core, self.messages)
        self.failures = Failures(core, self.puts, self.dead)
        self.queues = Queues(core, self.recurring)
        self.admin = Admin(core)
        self.notes = SharedNotes(core)

    @classmethod
    def from_url(cls, url: str, *, ssl: Any = None, **options: Any) -> TimeoutCenter:
        """The timeout center behind a broker URL: as :func:`kombu_toc.center_for`."""
        # The task library, which it may need, is in a room above this one.
        center: TimeoutCenter = import_module("kombu_toc").center_for(url, ssl=ssl, **options)
        return center

    @property
    def limits(self) -> Limits:
        """What holds for queues whose declarations do not say."""
        return self.context.limits

    # -- the task library

    @property
    def recorder(self) -> Recorder | None:
        """Who keeps a record of what is done here, if anybody does."""
        return self.core.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self.core.recorder = recorder
        self.registry.has_library = recorder is not None

    @property
    def library(self) -> TaskLibrary:
        """The task library behind this center. Raises ConfigurationError if there is none."""
        if self.recorder is None:
            raise ConfigurationError(
                "this center has no task library: set toc_library in its URL or options, as in "
                "from_url('toc+redis://localhost', toc_library='sqlite:////path/library.db')"
            )
        return self.recorder.library

    # -- put, pop, and what ends a delivery

    put = Delegate("puts", Puts.put)
    put_many = Delegate("puts", Puts.put_many)
    pop = Delegate("deliveries", Deliveries.pop)
    consume = Delegate("loops", Loops.consume)
    ack = Delegate("deliveries", Deliveries.ack)
    reject = Delegate("deliveries", Deliveries.reject)
    bury = Delegate("deliveries", Deliveries.bury)
    release = Delegate("deliveries", Deliveries.release)
    extend = Delegate("deliveries", Deliveries.extend)

    # -- messages by id, by state and time

    get = Delegate("messages", Messages.get)
    cancel = Delegate("messages", Messages.cancel)
    reschedule = Delegate("messages", Messages.reschedule)
    run_now = Delegate("messages", Messages.run_now)
    scan = Delegate("messages", Messages.scan)
    count = Delegate("messages", Messages.count)
    counts = Delegate("queues", Queues.counts)


# -- makes a timeout center with the settings of a connection


def make_center(client: redis.Redis, settings: Settings) -> TimeoutCenter:
    """A center with these settings."""
    return TimeoutCenter(
        client,
        settings.prefix,
        steps=settings.priority_steps,
        slots=settings.toc_slots,
        retries=settings.toc_retries,
        limits=settings.limits,
        wait_replicas=settings.toc_wait_replicas,
        wait_timeout=settings.toc_wait_timeout,
        metrics=_metrics_of(client, settings),
        pop_bytes=settings.toc_pop_bytes,
    )


def _metrics_of(client: redis.Redis, settings: Settings) -> Metrics:
    """The metrics of this process for a server. They outlive its connections."""
    if not settings.toc_metrics:
        return Metrics(active=False)
    pool: Any = client.connection_pool
    where = pool.connection_kwargs
    place = tuple(where.get(name) for name in ("host", "port", "path", "db"))
    if name := getattr(pool, "service_name", None):
        place = (repr(pool.sentinel_manager), name, where.get("db"))
    return Metrics.of((*place, settings.prefix))


# -- what an ACL user may, and how much memory topics take

#: The scripts of whoever publishes, and what a consumer adds to them.
PRODUCERS = (
    *("admit", "bind", "bound", "broadcast", "counts", "declare", "put", "put_special", "unbind"),
)
CONSUMERS = (
    *("ack", "due", "elect", "extend", "hand_back", "pass_on", "pop", "present", "purge", "recall"),
    *("bury", "recheck", "recur", "recurring", "mark", "reject", "release", "sweep", "upkeep"),
    "use",
)


def check_permitted(center: TimeoutCenter, scripts: Iterable[str]) -> None:
    """Make sure that the scripts may run all their commands.

    Raises NotPermittedError, which names those that they may not.
    """
    wanted = sorted(commands_of(scripts))
    try:
        refused = center.runner.run(
            ScriptCall(load("allowed"), (center.keys.write_probe,), wanted, texts)
        )
    except ResponseError as exc:
        if is_refused(exc) and not isinstance(exc, NotPermittedError):
            raise explained(exc, center.client.connection_pool) from exc
        raise
    if refused := [command for command in refused if command in wanted]:
        names, rule = ", ".join(refused), " ".join(f"+{command}" for command in refused)
        user = center.client.connection_pool.connection_kwargs.get("username") or "default"
        raise NotPermittedError(
            f"the user {user!r} may not run {names}, without which messages could be lost: "
            f"ACL SETUSER {user} {rule}; {DOCUMENT}"
        )


# -- estimates how much memory topics take in Redis, from a bounded number of samples

#: Slots that are looked at, of all topics together.
SAMPLED = 512

#: Commands that leave together.
TOGETHER = 1000


def estimate_memory(
    center: TimeoutCenter, topics: Iterable[str], *, sampled: int = SAMPLED
) -> dict[str, int] | None:
    """Estimate how many bytes each topic's messages take in Redis: {topic: bytes}.

    sampled: how many slots are measured in all. If the topics have more, some slots stand for the
        others: the CRC spreads messages evenly. Redis itself estimates a large key from some of
        its members.

    Returns None if the server refuses ``MEMORY USAGE``.
    """
    names = list(topics)
    each = max(sampled // max(len(names), 1), 1)
    wanted: list[tuple[str, float, str]] = []
    for name in names:
        topic = center.registry.known(name) or center.registry.topic(name)
        step = max(-(-topic.slot_span // each), 1)
        slots = range(0, topic.slot_span, step)
        share = topic.slot_span / len(slots)
        wanted += [(name, share, key) for n in slots for key in topic.slot(n).all()]
    estimates = dict.fromkeys(names, 0.0)
    for part in parts_of(wanted, TOGETHER):
        asked = (("MEMORY USAGE", key) for _, _, key in part)
        replies = pipelined(center.client, asked, raises=False)
        for (name, share, _), reply in zip(part, replies, strict=True):
            if isinstance(reply, Exception):  # an ACL user who may not ask
                return None
            estimates[name] += share * (reply or 0)
    return {name: round(size) for name, size in estimates.items()}
