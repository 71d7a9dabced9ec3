"""What producers and consumers ask for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..scripts.call import Countdown

#: Seconds for which a producer's latest publish to a slot is remembered, so that a repeated one is
#: recognised.
REMEMBER = 60


class PutRequest(NamedTuple):
    """A message to be added.

    at_us: action time, microseconds since the epoch; one that has passed means now
    delay_us: instead of `at_us`, microseconds from now by Redis's clock
    basis: slot basis; the id unless given
    priority: 0 goes first
    token: tells this message from another live one with the same id, which may then have two;
        without it, the CRC-32 of the body does
    ensure: add nothing if a live message has this id
    publish: (producer, name of this publish): a repeated publish adds nothing
    remember: seconds for which a repeated `publish` is recognised
    replaces: it takes the place of a message that was delivered; a server that is full accepts it
    traits: what holds for it and not for its topic, as :func:`.model.traits.traits_of` makes it
    counted: whether it counts among what may be put into its topic; what `replaces` another does
        not
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
    ensure: bool = False
    publish: tuple[str, str] | None = None
    remember: int = REMEMBER
    replaces: bool = False
    traits: str = ""
    counted: bool = True
    goes_on: bool = False


class NewMessage(NamedTuple):
    """A message of :meth:`.deliveries.Deliveries.put_many`; the fields are the arguments of
    :meth:`.deliveries.Deliveries.put`.

    at: action time, seconds since the epoch; a past one means now
    delay: instead of `at`, seconds from now by Redis's clock
    basis: slot basis; the key unless given, or the id
    priority: 0 goes first
    token: tells this message from another live one with the same id; the CRC-32 of the body unless
        given
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
    recover, until_us: roll back up to so many leases a slot that ended by then, in microseconds
        since the epoch by Redis's clock; by now unless given
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
    until_us: int | None = None
    claimed: bool = True
    remember: int = 0
    heads: int = 0
