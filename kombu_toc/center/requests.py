"""What producers and consumers ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from ..errors import RateLimitedError
from ..metrics.counters import TopicCounts, count_first
from ..model.keys import Slot
from ..model.results import DEAD, OUTCOMES, WAITING, Delivery, Put, PutTogether, Settled
from ..model.topic import Topic
from ..scripts.call import Countdown, text

# -- what producers and consumers ask for

#: What a put does if a live message has its id: it adds another one, adds nothing, or gives body
#: and time to the newest one that waits.
ADD, KEEP, REPLACE = "add", "keep", "replace"

#: Seconds for which a producer's latest publish to a slot is remembered, so that a repeated one is
#: recognised.
REMEMBER = 60

#: Seconds for which a put with a token of its caller's is remembered after its message was due.
REMEMBER_TOKEN = 3600


def suffix_of(name: str) -> str:
    """What tells the message of a put from others with the same id."""
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class PutRequest(NamedTuple):
    """A message to be added.

    at_us: action time, microseconds since the epoch; one that has passed means now
    delay_us: instead of `at_us`, microseconds from now by Redis's clock
    basis: slot basis; the id unless given
    priority: 0 goes first
    token: made of the name of this put: tells this message from others with the same id; any
        unless given
    if_exists: ADD, KEEP or REPLACE: what is done if a live message has this id
    publish: (producer, name of this put): a repeated put adds nothing
    remember: seconds for which a repeated `publish` is recognised
    has_name: its body says which put it is of: the same bytes under its id are the same message
    replaces: it takes the place of a message that was delivered; a server that is full accepts it
    traits: what holds for it and not for its topic, as :func:`.model.delivery.traits_of` makes it
    counted: whether it counts among what may be put into its topic; what `replaces` another does
        not unless this says so: then it counts, and is not refused
    goes_on: it goes on for the message of its id that was delivered, as what `replaces` one does:
        where the messages of a key start in their order, it holds the key in its place
    """

    id: str
    body: bytes
    at_us: int | Countdown | None = None
    delay_us: int | None = None
    basis: str | None = None
    priority: int = 0
    token: str | None = None
    if_exists: str = ADD
    publish: tuple[str, str] | None = None
    remember: int = REMEMBER
    replaces: bool = False
    traits: str = ""
    counted: bool | None = None
    goes_on: bool = False
    has_name: bool = False


def named_by(request: PutRequest, token: str, now: float) -> PutRequest:
    """A message whose put has a token of its caller's, for its id.

    now: seconds since the epoch
    """
    name = suffix_of(f"{request.id}\0{token}")
    at_us, waits_us = request.at_us, request.delay_us or 0
    if isinstance(at_us, int):
        waits_us = at_us - int(now * 1_000_000)
    remember = REMEMBER_TOKEN + max(waits_us, 0) // 1_000_000
    return request._replace(token=name, publish=(f"={name}", name), remember=remember)


class NewMessage(NamedTuple):
    """A message of :meth:`.pop.Deliveries.put_many`; the fields are the arguments of
    :meth:`.pop.Deliveries.put`.

    at: action time, seconds since the epoch; a past one means now
    delay: instead of `at`, seconds from now by Redis's clock
    basis: slot basis; the key unless given, or the id
    priority: 0 goes first
    token: names its put for the caller
    visibility: seconds that a delivery of it lasts unless it is renewed
    max_lease: seconds for which one delivery of it may be renewed in all; 0: for ever
    expiration: seconds after its due time when it expires
    key: what it is about; its topic may limit what starts of each key
    """

    id: str
    body: bytes
    at: float | None = None
    delay: float | None = None
    basis: str | None = None
    priority: int = 0
    token: str | None = None
    visibility: float | None = None
    max_lease: float | None = None
    expiration: float | None = None
    key: str | int | None = None


class PopRequest(NamedTuple):
    """What a pop asks for.

    name: a name that no other pop has: a consumer, a dot and a number
    slots: only these; all unless given. On a Cluster, exactly one
    ready_limit, lookahead_us: deliver up to so many messages that are due within so many
        microseconds
    overdue_limit, behind_us: deliver up to so many messages that have been due for so many
        microseconds; the two limits include each other
    visibility: seconds that the messages may stay unacknowledged and unrenewed; as each says, or
        its topic, unless given
    recover: roll back up to so many leases a slot that have ended
    claimed: announce again what is left even if it was announced: who pops may have claimed that.
        It matters on a Cluster
    heads: of how many messages a pop that may deliver none tells step and score
    remember: seconds for which :meth:`Commands.recall` delivers the messages once more; the
        consumer's next pop that begins with the same slot ends it
    """

    name: str
    slots: Iterable[int] | None = None
    ready_limit: int = 1
    lookahead_us: int = 0
    overdue_limit: int = 0
    behind_us: int = 0
    visibility: float | None = None
    recover: int = 0
    claimed: bool = True
    remember: int = 0
    heads: int = 0


# -- reads the replies of the scripts of producers and consumers, and counts what they have done


def read_deliveries(
    topic: Topic, numbers: Sequence[int], name: str, flat: list[Any]
) -> list[Delivery]:
    """The deliveries of a pop of that name."""
    retries = topic.declaration.retries

    def named(id: bytes | list[Any]) -> tuple[bytes, str, int]:
        """id, token, when it may start"""
        if isinstance(id, list):
            return id[0], id[1].decode(), id[2] if len(id) > 2 else 0
        return id, name, 0

    return [
        Delivery(
            topic.name,
            numbers[flat[i]],
            flat[i + 1],
            id.decode("utf-8", "surrogatepass"),
            flat[i + 3],
            flat[i + 4],
            retries,
            birth,
            start_us,
        )
        for i in range(0, len(flat), 5)
        for id, birth, start_us in [named(flat[i + 2])]
    ]


def read_starts(
    topic: Topic,
    numbers: Sequence[int],
    flat: list[Any],
    births: list[bytes],
    starts: list[int],
) -> list[Delivery]:
    """The deliveries of a pop of a topic that is limited."""
    retries = topic.declaration.retries
    name = topic.name
    messages = [
        Delivery(
            name,
            numbers[flat[i]],
            flat[i + 1],
            flat[i + 2].decode("utf-8", "surrogatepass"),
            flat[i + 3],
            flat[i + 4],
            retries,
            birth.decode(),
        )
        for i, birth in zip(range(0, len(flat), 5), births, strict=True)
    ]
    for at, start_us in zip(starts[::2], starts[1::2], strict=True):
        messages[at] = messages[at]._replace(start_us=start_us)
    return messages


def read_put(counts: TopicCounts, raw: list[Any]) -> Put:
    """The result of a put."""
    id, outcome, now, *_ = raw
    counts.put += now > 0
    return Put(text(id), OUTCOMES[outcome], now or None)


def read_settled(counts: TopicCounts, counter: str, raw: list[Any]) -> Settled:
    """The result of an ack or a release; `counter` counts what was there."""
    return Settled(count_first(counts, counter, raw), [number - 1 for number in raw[1]])


def read_put_many(counts: TopicCounts, number: int, raw: list[Any]) -> PutTogether:
    """The result of a call that puts so many messages."""
    now, there, taken, *_ = raw
    counts.put += number - len(there) - len(taken)
    return PutTogether(now, there, taken)


def read_reject(counts: TopicCounts, counter: str, raw: list[Any]) -> str | None:
    """The state that a rejected message is in now; `counter` counts it if it comes back."""
    count_first(counts, counter, [raw[0] == 1])
    counts.dead += raw[0] == 2
    return {1: WAITING, 2: DEAD, 3: DEAD}.get(raw[0])


# -- how many messages may be put


def pace_key(topic: Topic, slot: Slot, *, clustered: bool) -> str:
    """Where the puts of a topic are counted: in one place, unless its slots are on several nodes.
    Then each key is counted in its own slot, and a topic that is counted as a whole has one."""
    return slot.put_pace if clustered else topic.slot(0).put_pace


def read_limited_put(topic: Topic, counts: TopicCounts, raw: list[Any]) -> Put | RateLimitedError:
    """The result of a put into a topic whose puts are limited; an error that runners raise."""
    if raw[1] >= 0:
        return read_put(counts, raw)
    counts.refused += 1
    return _refused(topic, raw[3], raw[4])


def read_limited_put_many(
    topic: Topic, counts: TopicCounts, number: int, raw: list[Any]
) -> PutTogether:
    """The result of a call that puts so many messages into such a topic."""
    now, there, taken, flat, *_ = raw
    refused = {flat[i]: _refused(topic, flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)}
    counts.refused += len(refused)
    put = read_put_many(counts, number - len(refused), [now, there, taken])
    return put._replace(refused=refused)


def _refused(topic: Topic, wait_us: int, kind: bytes) -> RateLimitedError:
    limit = "put_rate" if kind == b"p" else "key_put_rate"
    rate = getattr(topic.declaration, limit)
    whose = f"queue {topic.name!r}" if kind == b"p" else f"each key of queue {topic.name!r}"
    seconds = wait_us / 1e6
    return RateLimitedError(
        f"{whose} takes {rate} ({limit}), and has got as many; the message was not kept. One more "
        f"may be put in {seconds:.6g} seconds",
        limit,
        seconds,
    )
