"""The name of every Redis key. Nothing else builds a key."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ConfigurationError

#: Minutes for which counters are kept one by one.
MINUTES = 64


def check_name(name: str) -> None:
    """Raise ConfigurationError for a name that is none, or cannot be encoded as UTF-8."""
    if not isinstance(name, str):
        raise ConfigurationError(f"a queue is named by a str, not {name!r:.100}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{name!r} cannot name a queue: it has half of a surrogate pair, which no UTF-8 can "
            "hold; a name that was read from bytes has to be decoded as what it is"
        ) from None


def encode_name(name: str) -> str:
    """Percent-encode the characters that would end a hash tag early or leave it empty."""
    return name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")


def slot_of(key: str | bytes) -> tuple[str, int] | None:
    """The topic and the number of the slot that a key belongs to; None if it belongs to none."""
    name = key if isinstance(key, str) else key.decode("utf-8", "surrogatepass")
    topic, colon, number = name.partition("{")[2].partition("}")[0].rpartition(":")
    if not (colon and number.isdigit()):
        return None
    return topic.replace("%7D", "}").replace("%7B", "{").replace("%25", "%"), int(number)


def schedule_place(name: str, topic: str = "") -> str:
    """A member of `schedule_places`. Without the topic, all members of that name begin with it."""
    return name.replace("%", "%25").replace("\0", "%00") + "\0" + topic


#: Keys that are hashes, by the first word after their tag.
_HASHES = (
    *("body", "reasons", "tokens", "claims", "busy", "holders", "schedules", "templates"),
    *("leaving", "topics", "counted", "minutes", "firings", "copies", "parts", "edition"),
    *("scripts", "failures"),
)

#: Of keys, by the first word after their tag: the command that reads any key of its type, and what
#: that is. All others are sorted sets.
_READ: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(_HASHES, (("HEXISTS", ""), "hash")),
    **dict.fromkeys(
        ("watch", "sent", "bound", "upkeep", "speaker", "look", "restored"), (("GET",), "string")
    ),
    "paused": (("SCARD",), "set"),
    **dict.fromkeys(("log", "fanout", "part", "audit"), (("XLEN",), "stream")),
}


def reading(key: str) -> tuple[tuple[str, ...], str]:
    """The command that Redis refuses if the key is of another type than it should be, and that
    type."""
    word = key.partition("}:")[2].partition(":")[0]
    (name, *rest), kind = _READ.get(word, (("ZCARD",), "sorted set"))
    return (name, key, *rest), kind


def _named(kind: str) -> Callable[[Keys, str], str]:
    def key(keys: Keys, name: str) -> str:
        return f"{keys.stem}{kind}:{name}"

    return key


class Keys:
    """The keys that belong to no slot; all share the tag ``{toc}``."""

    #: name -> string: the answer to a request over HTTP that has an Idempotency-Key, or that
    #: somebody is at it; expires
    answer = _named("answer")
    #: name -> string: the token with which a session of the page was begun; expires
    session = _named("session")
    #: name -> hash: how far the page has come with what it does to many messages; expires
    job = _named("job")
    #: topic -> sorted set: the topic's announcements that no consumer has claimed
    wake = _named("wake")
    #: exchange -> sorted set: binding -> when it expires, in ms
    bindings = _named("bindings")
    #: exchange -> string: the version of the bindings
    bound = _named("bound")
    #: exchange -> stream: the exchange's broadcast messages, without those of parts
    fanout = _named("fanout")
    #: exchange -> hash: part -> until when it has a reader, in ms
    parts = _named("parts")
    #: producer -> string: the producer's latest broadcast, kept for as long as it may be repeated
    sent = _named("sent")
    #: topic -> string: the process elected to report what is in the topic
    speaker = _named("speaker")
    #: source -> hash: which edition of a source's schedules is in force, and who puts it
    edition = _named("edition")
    #: source -> sorted set: former editions of a source's schedules -> when they were replaced, in
    #: ms
    editions = _named("editions")
    #: topic -> sorted set, of a topic that its consumers keep: process -> until when it counts as
    #: one, in ms
    users = _named("users")
    #: topic -> hash: counter -> number since the topic was declared
    counted = _named("counted")
    #: topic -> hash, a ring: the same for each of the last minutes, by the minute's number since
    #: the epoch, modulo MINUTES
    minutes = _named("minutes")

    def __init__(self, prefix: str) -> None:
        if "{" in prefix or "}" in prefix:
            raise ConfigurationError(f"key prefix {prefix!r} may not contain braces")
        self.prefix = prefix
        self.stem = stem = f"{prefix}{{toc}}:"
        #: hash: topic -> its declaration
        self.topics = stem + "topics"
        #: sorted set: the names of all topics, each with 0: they are read in order, in pages
        self.names = stem + "names"
        #: sorted set: transient topic or binding -> when it expires unless it is refreshed, in ms
        self.expiring = stem + "expiring"
        #: sorted set: a consumer and its topics -> when that entry expires, in ms
        self.consumers = stem + "consumers"
        #: set: topics whose consumption is paused
        self.paused = stem + "paused"
        #: string: there unless Redis lost what operators have done; expires while that is restored
        self.restored = stem + "restored"
        #: never set: deleting it shows whether the server accepts writes
        self.write_probe = stem + "nothing"
        #: hash: script:calls, script:timed, script:us -> number, for all topics
        self.scripts = stem + "scripts"
        #: sorted set: id of a message whose cancelling is to be reported -> when, in ms
        self.cancelled = stem + "cancelled"
        #: sorted set: topics that have schedules, each with 0
        self.scheduled_names = stem + "scheduled-names"
        #: sorted set: the names of schedules, each with its topic (:func:`schedule_place`) and 0
        self.schedule_places = stem + "schedule-places"
        #: string: the process elected for the upkeep of all topics; expires unless it is renewed
        self.upkeep = stem + "upkeep"
        #: the same: the process elected for what only some can do, such as to carry schedules on
        self.upkeep_also = stem + "upkeep:also"
        #: stream: what people have done on the page
        self.audit = stem + "audit"
        #: sorted set: the jobs that were begun last, by when; expires
        self.jobs = stem + "jobs"
        #: sorted set: queue of which failed tasks are kept -> when one failed, to a minute; expires
        self.failing = stem + "failing"

    def look(self, topic: str, place: int) -> str:
        """String: the process that looks into a topic for all pops that wait for it, or that stands
        next; expires."""
        return f"{self.stem}look:{place}:{topic}"

    def passed_on(self, topic: str, slot: int) -> str:
        """Sorted set: the slot's announcements that were passed on to those who prefer it, and
        that none of them has claimed; with the members of :meth:`wake`."""
        return f"{self.stem}zone:{slot}:{topic}"

    def part(self, exchange: str, part: str) -> str:
        """Stream: the broadcast messages of a part, which is a number or ``*``."""
        return f"{self.stem}part:{part}:{exchange}"


class Slot:
    """The keys of one slot; all share one hash tag, so they live on one node."""

    def __init__(self, prefix: str, topic: str, number: int, steps: tuple[int, ...]) -> None:
        self.number = number
        self.stem = stem = f"{prefix}{{{encode_name(topic)}:{number}}}:"
        #: sorted sets, one per priority step: id -> score
        self.stores = tuple(map(self.store, steps))
        #: sorted set: id -> when its lease ends
        self.prepare = stem + "prepare"
        #: sorted set: id -> when it died
        self.dead = stem + "dead"
        #: hash: id -> why it died and its last error, a line each; while it lives, the first is
        #: empty
        self.reasons = stem + "reasons"
        #: hash: id -> envelope
        self.body = stem + "body"
        #: hash: id -> the token of its lease, of messages that have been delivered
        self.tokens = stem + "tokens"
        #: sorted set: the times of the slot that are announced in the wake index and have not
        #: passed
        self.announced_times = stem + "armed"
        #: string: since when its leases are looked at without a gap, when they were last, and when
        #: one was first seen to have ended: see ``upkeep.lua``
        self.watch = stem + "watch"
        #: hash: schedule -> its record
        self.schedules = stem + "schedules"
        #: hash: schedule -> the envelope of which each of its firings is made
        self.templates = stem + "templates"
        #: hash: schedule -> its latest firings, a line each
        self.firings = stem + "firings"
        #: sorted set: schedule -> when it fires next, in microseconds since the epoch
        self.coming = stem + "coming"
        #: sorted set: the names of the schedules, each with 0
        self.schedule_names = stem + "schedule-names"
        #: sorted set, one member: when a schedule was changed last, in microseconds. It is ahead of
        #: the clock if that was set back since
        self.schedules_changed = stem + "schedules-changed"
        #: sorted set: key -> when what may be put of it has been used up to, in us; ':' for all.
        #: It expires. Where all slots are on one server, slot 0 has those of all
        self.put_pace = stem + "put-pace"
        #: hash: unique key -> which message has it, since when, and until when
        self.claims = stem + "claims"
        #: of slot 0: sorted set: id of a task -> when it failed last, in microseconds; hash: id ->
        #: its record, and under the empty field the bytes of all
        self.failure_keys = (stem + "failed", stem + "failures")
        #: stream: which messages the recorder of the task library is to look at, and why
        self.log = stem + "log"
        #: hash: batch -> messages on their way to a slot of another node
        self.leaving = stem + "leaving"
        #: the keys in the order in which most scripts take them
        self.script_keys = (
            self.announced_times,
            self.prepare,
            self.body,
            self.dead,
            self.reasons,
            self.tokens,
            *self.stores,
        )
        #: sorted set: key -> when its rate has been used up to, in us; of slot 0, under the empty
        #: key, that of the whole topic
        self.pace = stem + "pace"
        #: sorted set: key that waits for its rate -> when it may go on, in us; for one that runs:
        #: infinity
        self.waits = stem + "waits"
        #: hash: key -> id that it is held by
        self.holders = stem + "holders"
        #: hash: key -> how many of it run; under the empty key, all of the slot
        self.busy = stem + "busy"
        #: the keys of its lanes, in the order in which scripts take them (``lanes.lua``):
        #: of a topic that limits what may start
        self.lane_keys = (
            #: sorted set without scores: key, priority step, score and id of what waits in a lane
            stem + "lanes",
            #: sorted set: key that may start something -> its order
            stem + "turns",
            self.waits,
            self.pace,
            #: sorted set: key -> where its last turn ended, of keys that take turns
            stem + "tags",
            self.busy,
            self.holders,
        )

    def store(self, step: int) -> str:
        """Sorted set: the waiting messages of a priority step, which need not be one of the
        topic's."""
        return self.stem + ("store" if not step else f"store:{step}")

    def copies(self, id: str) -> str:
        """Hash: id of each other live message that shares this id -> microseconds when it was put,
        a colon, and the score with which the message of this id waited then, if it did."""
        return f"{self.stem}copies:{id}"

    def sent(self, producer: str) -> str:
        """String: the producer's latest publish to this slot, kept for as long as it may be
        repeated."""
        return f"{self.stem}sent:{producer}"

    def given(self, consumer: str) -> str:
        """String: the reply to a consumer's latest pop of this slot and others, kept for as long as
        the consumer may ask for it again."""
        return f"{self.stem}sent:to:{consumer}"

    def all(self) -> list[str]:
        """Every key of the slot but `copies`, `sent` and `given`."""
        return [
            *self.script_keys,
            self.watch,
            *self.lane_keys,
            *self.of_schedules(),
            *(() if self.number else self.failure_keys),
            *(self.put_pace, self.claims, self.log, self.leaving),
        ]

    def of_schedules(self) -> list[str]:
        """The keys of the topic's schedules: its slot 0 has them."""
        if self.number:
            return []
        named = (self.schedule_names, self.schedules_changed)
        return [self.schedules, self.templates, self.firings, self.coming, *named]
