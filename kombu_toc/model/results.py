"""Results of the operations of a timeout center. Values only: nothing here asks a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from . import delivery, scores
from .delivery import read_receipt, write_receipt
from .limits import count_of, interval_us, spacing_us
from .topic import Declaration

# -- what the operations of a timeout center return

#: The states of a message.
WAITING, IN_FLIGHT, DEAD = "waiting", "in flight", "dead"

#: State number in a script's reply -> state.
STATES = {1: WAITING, 2: IN_FLIGHT, 3: DEAD}

#: Kinds of faults, and what repair does about each.
NO_BODY = "no body"  #: an id without a body: the id is removed, for there is nothing to deliver
NO_ENTRY = "no entry"  #: a body without an id: goes to DeadQueue; its due time is unknown
TWICE = "twice"  #: an id in several places: the one nearest to delivery stays, in flight first
STRAY_REASON = "stray reason"  #: a reason or an error of a message that is gone: removed
STRAY_TOKEN = "stray token"  #: the name of a delivery of a message that is gone: removed
STRAY_COPY = "stray copy"  #: a copies set names a message that is gone: the name is removed
OTHER_TYPE = "other type"  #: a key that another program has written: it is renamed, to the place
UNANNOUNCED = "unannounced"  #: a slot's next time is not announced: it is announced
NO_LANE = "no lane"  #: it waits in a lane that does not have it: it is entered there
MISCOUNTED = "miscounted"  #: not as many of a key run as are counted: they are counted anew
OTHER_STEP = "other step"  #: it waits under a priority step that the topic lacks: it is moved

#: Number of a fault in a script's reply -> kind of fault.
FAULT_KINDS = {
    1: NO_BODY,
    2: NO_ENTRY,
    3: TWICE,
    4: STRAY_REASON,
    5: UNANNOUNCED,
    6: OTHER_STEP,
    7: STRAY_TOKEN,
    8: NO_LANE,
}

#: Bytes of a body, and characters of a text, that the repr of a result shows.
MAX_SHOWN = 60


def _brief_repr(result: Any) -> str:
    """The repr of a named tuple that may hold a body: long fields are cut."""

    def shown(value: Any) -> str:
        if not isinstance(value, (bytes, str)) or len(value) <= MAX_SHOWN:
            return repr(value)
        unit = "bytes" if isinstance(value, bytes) else "characters"
        return f"{value[:MAX_SHOWN]!r}... ({len(value)} {unit})"

    fields = (f"{name}={shown(getattr(result, name))}" for name in result._fields)
    return f"{type(result).__name__}({', '.join(fields)})"


class Delivery(NamedTuple):
    """A message as a pop delivered it."""

    topic: str
    slot: int
    step: int
    id: str
    score: int
    body: bytes
    limit: int  #: the topic's retries
    #: names this delivery: tells the message from earlier and later ones with its id, and this
    #: delivery from the message's other deliveries
    birth: str = ""
    #: of a queue or key with a rate: when it may start, in microseconds since the epoch, if that is
    #: a moment ahead; 0: at once
    start_us: int = 0

    @property
    def has_place(self) -> bool:
        """Whether it counts among those that run, of a queue or key with a limit of these: until
        it is acknowledged, rejected or released, or its lease ends."""
        birth = self.birth
        return ";" in birth and (",p1" in birth or ";p1" in birth)

    @property
    def action_us(self) -> int:
        """When it was due, in microseconds since the epoch; 0 if it was rolled back."""
        return scores.action_time(self.score)

    @property
    def retries_left(self) -> int:
        left = scores.retries_left(self.score)
        return self.limit if left is None else left

    @property
    def lease_token(self) -> int:
        """Tells this delivery's lease from the leases of the message's other deliveries."""
        return scores.lease(0, self.step, self.retries_left)

    def due_at(self, us: int) -> Delivery:
        """This delivery; given back, the message is due at that time, in microseconds since the
        epoch, and not when it was."""
        left = scores.retries_left(self.score)
        score = scores.action(us) if left is None else scores.tried(-(-us // 1000), left)
        return self._replace(score=score)

    @property
    def failures(self) -> int:
        """How often it was delivered before and rolled back."""
        return max(self.limit - self.retries_left, 0)

    @property
    def requeues(self) -> int:
        """How often a consumer has requeued it, which costs no retry."""
        return delivery.trait(self.birth, "r") or 0

    @property
    def redelivered(self) -> bool:
        """Whether a consumer was handed it before: it may have begun."""
        left, birth = scores.retries_left(self.score), self.birth
        if left is not None and left < self.limit:
            return True
        return ";" in birth and delivery.trait(birth, "r") is not None

    @property
    def receipt(self) -> str:
        """A text that names this very delivery, in any process: letters, digits, ``.``, ``-`` and
        ``_``. It is not secret, and about a third longer than topic and id."""
        return write_receipt(
            (self.topic, self.slot, self.step, self.id, self.score, self.limit, self.birth)
        )

    @classmethod
    def of_receipt(cls, receipt: str) -> Delivery:
        """The delivery that a receipt names, without its body. Raises ReceiptError."""
        topic, slot, step, id, score, limit, birth = read_receipt(receipt)
        return cls(topic, slot, step, id, score, b"", limit, birth)

    @property
    def visibility(self) -> float | None:
        """Seconds that its lease lasts unless it is renewed, if it has a visibility of its own;
        None: what its topic says, or the connection."""
        own = delivery.trait(self.birth, "v")
        return None if own is None else own / 1000

    @property
    def outlives_ack(self) -> bool:
        """Whether it holds something until its task has ended, although it was acknowledged: a
        place, a unique key, or off the next firing of its schedule."""
        return self.has_place or delivery.trait(self.birth, "u") == 1 or self.runs_alone

    @property
    def runs_alone(self) -> bool:
        """Whether it is a firing of a schedule of which no two may run at once."""
        return ";" in self.birth and delivery.trait(self.birth, "s") is not None

    @property
    def ends_us(self) -> int | None:
        """When this delivery ends although it is renewed, in microseconds since the epoch; None:
        never."""
        ms = delivery.last_end(self.birth)
        return None if ms is None else ms * 1000

    @property
    def expires_us(self) -> int | None:
        """When the message expires if it comes back by then, in microseconds since the epoch;
        None: never."""
        ms = delivery.trait(self.birth, "x")
        return None if ms is None else ms * 1000

    @property
    def key(self) -> str | None:
        """The message's key; None if it has none. Of one that is longer than 200 characters when
        it is percent-encoded, ``h.`` and its SHA-256."""
        return delivery.key_in(self.birth)


class Consumer(NamedTuple):
    """A process that consumes a topic."""

    host: str
    pid: int

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}"


#: What a put did: it added a message; it left the one that was there; it gave its body and time to
#: one that was waiting; or it was a repetition of a put that had been done before.
ADDED, KEPT, REPLACED, REPEATED = "added", "kept", "replaced", "repeated"

#: Number of an outcome in a script's reply -> outcome.
OUTCOMES = {0: REPEATED, 1: ADDED, 3: KEPT, 4: REPLACED}


@dataclass(frozen=True, slots=True)
class Put:
    """The result of one put."""

    id: str  #: the id that the message is kept under
    outcome: str  #: ``added``, ``kept``, ``replaced`` or ``repeated``
    #: Redis's clock, if the message is new
    now_us: int | None = field(default=None, compare=False, repr=False)

    @property
    def added(self) -> bool:
        """Whether there is one message more."""
        return self.outcome == ADDED

    @property
    def by_this_put(self) -> Put:
        """This result, if nobody else has the put's name: what it finds repeated, it has added."""
        return replace(self, outcome=ADDED) if self.outcome == REPEATED else self

    @property
    def is_new(self) -> bool:
        """Whether the message is this put's, and was not there before."""
        return self.outcome in (ADDED, REPLACED)


class PutTogether(NamedTuple):
    """The result of one call of a put of many."""

    now_us: int  #: Redis's clock
    there: list[int]  #: which messages were there already, by their places in the call
    taken: list[int]  #: which were not added because another message has their id
    #: which were not added because of a rate, and the error of each
    refused: Mapping[int, Exception] = {}


class Popped(NamedTuple):
    """The result of one pop."""

    now_us: int  #: Redis's clock
    #: whether due messages are left; of those chosen by a predicate, whether it has not been asked
    #: about all, since there were enough or it was asked about as many as it may be
    more: bool
    messages: list[Delivery]
    bare: list[str]  #: ids without a body; they are removed
    rolled_back: list[str]  #: ids whose leases had ended
    died: list[str]  #: those of `rolled_back` that had no retries left
    dropped: list[str]  #: ids that DeadQueue no longer keeps: too old, or too many
    #: (key, member) of copies sets whose message is gone; the caller removes them
    stray: list[tuple[str, str]]
    expired: list[str] = []  #: ids that were too old to be delivered: they died, or are deleted
    #: why slots of other nodes of a Cluster gave nothing, although there are messages of some
    errors: list[Exception] = []


class Settled(int):
    """How many messages were acknowledged or released: an int, with those that were not.

    stale: the messages or receipts, as they were given, whose messages were no longer there
        (acknowledge) or no longer held by that delivery (release); in the result of a script call
        their positions
    """

    stale: Sequence[Any]

    def __new__(cls, number: int, stale: Sequence[Any] = ()) -> Settled:
        made = super().__new__(cls, number)
        made.stale = stale
        return made


class Purged(int):
    """How many messages were deleted: an int, with the schedules whose next firing was among them.

    schedules: their names, in order. Each goes on with the firing after that
    """

    schedules: Sequence[str]

    def __new__(cls, number: int, schedules: Iterable[str] = ()) -> Purged:
        made = super().__new__(cls, number)
        made.schedules = sorted(schedules)
        return made


class Lost(list[Delivery]):
    """Deliveries whose leases could not be renewed.

    overran: those of them that have ended because their max lease has passed
    """

    def __init__(self, lost: Iterable[Delivery], overran: Sequence[Delivery] = ()) -> None:
        super().__init__(lost)
        self.overran = overran


class Found(NamedTuple):
    """A message as it was found."""

    topic: str
    slot: int
    id: str
    state: str  #: WAITING, IN_FLIGHT or DEAD
    step: int
    score: int
    body: bytes
    reason: str  #: why it is dead
    error: str = ""  #: the last error that a consumer reported for it
    #: what is kept of its latest delivery, and its traits: see :mod:`.delivery`
    token: str = ""
    #: whether it is in the task library only, because its time is far ahead (``x-horizon``)
    far: bool = False

    def __repr__(self) -> str:
        return _brief_repr(self)

    def _trait(self, letter: str) -> int | None:
        return delivery.trait(self.own_token, letter)

    def _seconds(self, letter: str) -> float | None:
        ms = self._trait(letter)
        return None if ms is None else ms / 1000

    @property
    def own_token(self) -> str:
        """Its token; empty if another message has left it."""
        if self.state == WAITING and not delivery.is_still(self.token, self.score):
            return ""
        return self.token

    @property
    def key(self) -> str | None:
        """Its key, as :attr:`Delivery.key`; None if it has none."""
        return delivery.key_in(self.own_token)

    @property
    def unique(self) -> str | None:
        """The unique key with which it was put; None if it has none. Of one that is longer than
        200 characters when it is percent-encoded, ``h.`` and its SHA-256."""
        return delivery.unique_in(self.own_token)

    @property
    def visibility(self) -> float | None:
        """Seconds that a lease of it lasts unless it is renewed, if it has a visibility of its
        own; None: what its topic says, or the connection."""
        return self._seconds("v")

    @property
    def max_lease(self) -> float | None:
        """Seconds for which one delivery of it may be renewed in all, if it has a max lease of its
        own; 0: for ever; None: what its topic says, or the connection."""
        return self._seconds("m")

    @property
    def expiration(self) -> float | None:
        """Seconds after its due time when it expires, if it has an expiration of its own."""
        return self._seconds("e")

    @property
    def expires_us(self) -> int | None:
        """When it expires, in microseconds since the epoch; None: never, or only its topic says
        so and it was not delivered yet."""
        ms, lives = self._trait("x"), self._trait("e")
        if ms is not None:
            return ms * 1000
        if lives is None or self.state != WAITING or not self.time_us:
            return None
        return self.time_us + lives * 1000

    @property
    def time_us(self) -> int:
        """When it is due, when its lease ends, or when it died, in microseconds since the epoch;
        0 if it was rolled back and is due at once."""
        if self.state == WAITING:
            return scores.action_time(self.score)
        return scores.read_lease(self.score).ms * 1000

    @property
    def retries_left(self) -> int | None:
        """How often it may still be rolled back; None if it has not been delivered yet."""
        if self.state == WAITING:
            return scores.retries_left(self.score)
        return scores.read_lease(self.score).retries


class Cancelled(NamedTuple):
    """The result of cancelling one message."""

    topic: str
    id: str
    state: str  #: the state it was in
    deleted: bool
    tried: bool = False  #: it was delivered before; that consumer may still have it
    body: bytes = b""  #: the body of a deleted message
    token: str = ""  #: of a deleted message: names its latest delivery, and has its traits
    schedule: str = ""  #: the schedule whose next firing it was: that goes on with the one after it

    def __repr__(self) -> str:
        return _brief_repr(self)


class Rescheduled(NamedTuple):
    """The result of rescheduling one message."""

    topic: str
    id: str
    state: str  #: the state it is in
    moved: bool
    time_us: int = 0  #: when it is due now, if it was moved


class Missing(NamedTuple):
    """Slots of a topic that could not be asked, while others were."""

    topic: str
    slots: tuple[int, ...]
    server: str  #: host and port of their node, as far as it is known
    error: str  #: why it did not answer

    def __str__(self) -> str:
        if not self.slots:  # the task library
            return f"{self.server} ({self.error})"
        slots = f"slot{'' if len(self.slots) == 1 else 's'} {', '.join(map(str, self.slots))}"
        return f"{slots} of {self.topic!r} at {self.server} ({self.error})"


class Page(NamedTuple):
    """A page of messages that a scan has read."""

    messages: list[Found]
    after: str | None  #: where the next page begins; None: there is no next page


#: Where reading of a slot begins: behind this score and id there, or in a later slot and place.
Begin = tuple[int, bytes, int, int]


class Position(NamedTuple):
    """Where a scan is. A scan reads in the order of its positions, which is total."""

    score: int
    topic: str
    id: bytes
    slot: int
    kind: int

    def within(self, topic: str) -> Begin:
        """Where reading of a topic's slots begins."""
        if topic == self.topic:
            return self.score, self.id, self.slot, self.kind
        # Of those with the same score, the ones of earlier topics have been read.
        return self.score + (topic < self.topic), b"", -1, -1


#: Is told how far an operation has come, now and then: how many are done, and of about how many; 0:
#: nobody knows. What it raises ends the operation there.
OnProgress = Callable[[int, int], Any]


def tell_nobody(done: int, of: int) -> None:
    """Progress that nobody has asked for."""


class Counts(NamedTuple):
    """How many messages a topic or a slot holds."""

    ready: int  #: due
    scheduled: int  #: waiting for their action time
    in_flight: int
    dead: int

    @property
    def waiting(self) -> int:
        return self.ready + self.scheduled


#: Where a limit of a topic comes from: its declaration, or the connection that describes it.
DECLARED, DEFAULT = "declared", "default"


class Limit(NamedTuple):
    """A limit of a topic."""

    value: Any
    source: str  #: DECLARED, or DEFAULT: then it is that of whoever uses the topic


class Description(NamedTuple):
    """A topic as it is declared, and what is in it."""

    topic: str
    slots: int
    #: name -> what holds: ``retries``, the fields of :class:`Limits`, what limits starts, keys and
    #: puts (``TERMS``), and ``steps``, under which messages are put
    limits: dict[str, Limit]
    closed_steps: tuple[int, ...]  #: steps under which messages may still be, and none are put
    expires_ms: int | None  #: milliseconds after which it goes away if nobody uses it; None: never
    draining_counts: tuple[int, ...]  #: former slot counts by which messages may still be placed
    paused: bool
    counts: Counts
    consumers: list[Consumer]  #: the processes that consume it, as they have reported
    target_stopped: str | None = None  #: why nothing is sent to its target any more


class Summary(NamedTuple):
    """The state of a topic."""

    topic: str
    slots: int
    counts: Counts
    #: how long the oldest due message has been due, in microseconds; 0 if none is due. A message
    #: that was rolled back and is due at once does not count: its due time is no longer known.
    oldest_us: int


class Unwritten(NamedTuple):
    """Changes without rows in the task library yet, of a queue that is kept ``behind``."""

    topic: str
    entries: int  #: how many changes of messages are not written
    oldest_us: int  #: for how long the oldest has waited, in microseconds; 0 if there is none
    #: whether more has changed than is kept: then all that waits is looked through
    incomplete: bool


class Fault(NamedTuple):
    """An inconsistency that check found."""

    topic: str
    slot: int
    #: NO_BODY, NO_ENTRY, TWICE, STRAY_REASON, STRAY_TOKEN, STRAY_COPY, UNANNOUNCED, OTHER_STEP,
    #: NO_LANE, MISCOUNTED or OTHER_TYPE
    kind: str
    #: empty if the fault is about the slot; of MISCOUNTED the key, or empty for the topic; of
    #: OTHER_TYPE the key in Redis
    id: str
    places: tuple[str, ...]  #: the keys that have the id


class Edition(NamedTuple):
    """The center's verdict on an edition.

    verdict: ``put``: the caller is to put it, or to go on; ``in force``: it is, and all of it is
        put; ``busy``: another process is putting one, ask again; ``former``: another is in force
    generation: how many editions there have been
    in_force: the edition that is; empty if none is
    release: its release; empty if it names none
    process: who put it
    unused: seconds since a process that has it said so
    busy: seconds for which another process may still put
    """

    verdict: str
    generation: int
    in_force: str
    release: str
    process: str
    unused: float
    busy: float


# -- what is used of the limits of a topic


class Used(NamedTuple):
    """One limit of a topic, and what is used of it now."""

    #: its name: ``rate``, ``concurrency``, ``key_rate``, ``key_concurrency``, ``key_order``,
    #: ``key_fair``, ``put_rate`` or ``key_put_rate``
    name: str
    value: Any  #: as the topic is declared with
    #: of a rate: how many of those that may come at once have come; of ``concurrency``: how many
    #: run. Of a limit of each key: of ``key_rate``, how many keys wait for it; of
    #: ``key_concurrency`` and ``key_order``, of how many keys something runs; of ``key_fair``, how
    #: many take turns; of ``key_put_rate``, how many keys have used some of it
    used: int
    of: int | None  #: how much there is, if it counts the whole topic
    #: microseconds until the next may come that has to wait for a rate; 0: now, or nothing waits
    opens_us: int


class Usage(NamedTuple):
    """Usage of a topic's limits."""

    topic: str
    limits: tuple[Used, ...]  #: those that it has
    running: int  #: messages that run and hold a place, where something counts what runs
    waiting: int  #: messages that are due and were not started
    keys_waiting: int  #: keys with something due that may not start it now
    oldest_us: int  #: for how many microseconds the oldest due message has waited


class SlotUsage(NamedTuple):
    """The reply of ``usage.lua`` for a slot."""

    now_us: int
    running: int
    keys_running: int
    keys_ready: int
    keys_paced: int
    opens_us: int
    keys_held: int
    oldest_us: int
    waiting: int
    used_until_us: int
    put_until_us: int
    keys_put: int


def usage_of(topic: str, said: Declaration, slots: Iterable[SlotUsage]) -> Usage:
    """Compute the usage of a topic's limits from that of its slots."""
    every = list(slots)

    def total(name: str) -> int:
        return sum(getattr(slot, name) for slot in every)

    now = every[0].now_us
    opens = min((slot.opens_us for slot in every if slot.opens_us), default=0)
    ahead, put_ahead = (
        max(getattr(slot, name) for slot in every) - now
        for name in ("used_until_us", "put_until_us")
    )
    whole = puts = _NO_RATE
    if said.rate:
        whole = _rate_used(spacing_us(said.rate), said.rate_burst or 1, ahead)
    if said.put_rate:
        puts = _rate_used(interval_us(said.put_rate), count_of(said.put_rate), put_ahead)
    running, keys_running = total("running"), total("keys_running")
    found = {
        "rate": whole,
        "concurrency": (running, said.concurrency, 0),
        "key_rate": (total("keys_paced"), None, max(opens - now, 0) if opens else 0),
        "key_concurrency": (keys_running, None, 0),
        "key_order": (keys_running, None, 0),
        "key_fair": (total("keys_ready"), None, 0),
        "put_rate": puts,
        "key_put_rate": (total("keys_put"), None, 0),
    }
    limits = tuple(
        Used(name, value, *used) for name, used in found.items() if (value := getattr(said, name))
    )
    keys_waiting = total("keys_paced") + total("keys_held")
    full = said.concurrency is not None and running >= said.concurrency
    if full or (said.rate and whole[2]):
        keys_waiting += total("keys_ready")
    return Usage(
        topic,
        limits,
        running,
        total("waiting"),
        keys_waiting,
        max(slot.oldest_us for slot in every),
    )


#: What is used where there is no rate.
_NO_RATE: tuple[int, int | None, int] = (0, None, 0)


def _rate_used(interval_us: float, burst: int, ahead_us: int) -> tuple[int, int | None, int]:
    """How many of a burst are used, of how many, and microseconds until one more may come.

    ahead_us: how far the rate has been used up beyond now
    """
    used = min(max(math.ceil(ahead_us / interval_us), 0), burst)
    return used, burst, max(math.ceil(ahead_us - (burst - 1) * interval_us), 0)
