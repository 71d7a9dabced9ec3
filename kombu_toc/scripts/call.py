"""A call of a script before it is sent: its keys and arguments, and how to read its reply."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from itertools import count
from secrets import token_urlsafe
from typing import Any, NamedTuple, TypeVar

from ..errors import ActionTimeError, ServerError, TocError
from ..model import scores

T = TypeVar("T")

# -- the Lua scripts: operations/ has one file per call, lib/ the fragments that several need
#
# A script's first comment is its documentation. The line ``--@ clock wake`` names the fragments
# that go before it. The line ``--< put`` stands for the text of that script, which runs there, with
# the fragments that it needs: in a branch or a function that few calls run, it costs the others
# nothing. A script that names ``unlimited`` has a second form, NAME_limited, for topics that are
# limited.


class Script(NamedTuple):
    """A script's text, and the SHA-1 that EVALSHA knows it by."""

    name: str
    text: str
    sha: str


def source(name: str) -> str:
    """The text of a script or a fragment, with its comments."""
    operation = files(__package__).joinpath(f"operations/{name}.lua")
    plain = name.removesuffix("_limited")
    if operation.is_file():
        return operation.read_text(encoding="ascii")
    if plain != name:
        return source(plain).replace("unlimited", "sorted lanes limited", 1)
    return files(__package__).joinpath(f"lib/{name}.lua").read_text(encoding="ascii")


def has_limited_form(name: str) -> bool:
    """Whether there is a script NAME_limited that is made of this one."""
    return "unlimited" in source(name)


def names() -> list[str]:
    """The scripts that are operations; a fragment is a part of others."""
    found = (file.name for file in files(__package__).joinpath("operations").iterdir())
    plain = [name.removesuffix(".lua") for name in found if name.endswith(".lua")]
    return sorted(plain + [f"{name}_limited" for name in filter(has_limited_form, plain)])


def _named(text: str, mark: str) -> list[str]:
    """What the lines that begin with this mark name."""
    lines = (line for line in text.splitlines() if line.startswith(mark))
    return [name for line in lines for name in line[len(mark) :].split()]


@cache
def load(name: str) -> Script:
    """The script of that name, its fragments included, without comments."""
    own = source(name)
    fragments = _named(own, "--@")
    while within := _named(own, "--<"):
        text = source(within[0])
        own = own.replace(f"--< {within[0]}\n", text)
        fragments = [*_named(text, "--@"), *fragments]
    parts = [*map(source, dict.fromkeys(fragments)), own]
    lines = (line.split("--")[0].rstrip() for part in parts for line in part.splitlines())
    text = "\n".join(line for line in lines if line)
    return Script(name, text, hashlib.sha1(text.encode()).hexdigest())


def commands_of(scripts: Iterable[str]) -> set[str]:
    """The commands that these scripts run, in lower case."""
    found: set[str] = set()
    for name in scripts:
        found.update(re.findall(r"call\(\s*'(\w+)'", load(name).text))
    return {name.lower() for name in found}


def name_of(sha: str) -> str | None:
    """The name of the script with this SHA-1; None if there is none."""
    return next((name for name in names() if load(name).sha == sha), None)


# -- A call of a script before it is sent

#: Bytes that are handed to a socket at once.
PIECE = 1 << 16

#: Bytes a second that the slowest supported connection carries.
SLOWEST = 1_000_000


class ScriptCall(NamedTuple):
    """A script with its keys and arguments, ready to be sent, and how to read its reply."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Any]
    parse: Callable[[Any], Any]
    keys_recur: bool = False  #: the same keys come again and again
    #: the topic's wake index if it is on another node than the keys, and the milliseconds after
    #: which it expires, or 0; None if it is among the keys, or if the script announces nothing
    wake: tuple[str, int] | None = None

    def result(self, reply: Any) -> Any:
        """The parsed reply. Raises ServerError for one that the script never gives."""
        try:
            return self.parse(reply)
        except TocError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as exc:
            raise ServerError(
                f"{reply!r:.200} is no reply that the script {self.script.name!r} gives; "
                "make sure that a Redis or Valkey answers, and no proxy changes what it says"
            ) from exc

    def announcing(self, reply: Any) -> Announced | None:
        """What the script has announced and settled in a wake index on another node; None if
        nothing."""
        told = reply[-2:] if isinstance(reply, list) else []
        if self.wake is None or not any(told) or list(map(type, told)) != [list, list]:
            return None
        return Announced(*self.wake, *told)

    def command(self, *, whole: bool = False) -> tuple[Any, ...]:
        """The Redis command: EVALSHA, or EVAL with the whole text."""
        args = [str(arg) if isinstance(arg, Countdown) else arg for arg in self.args]
        keys, args = (
            [as_bytes(part) if isinstance(part, str) else part for part in parts]
            for parts in (self.keys, args)
        )
        if whole:
            return ("EVAL", self.script.text, len(keys), *keys, *args)
        return ("EVALSHA", self.script.sha, len(keys), *keys, *args)

    def packed(self) -> bytes:
        """The EVALSHA command in Redis's protocol."""
        # Packed here and not by redis-py: that packs for one of its connections, in pieces of its
        # own, and cannot encode half of a surrogate pair. It is also faster: a loop of center.put
        # takes 31 us of processor time for a message, and 39 with redis-py's packing alone (25 and
        # 28 with hiredis); of Celery's apply_async 311 and 326 (302 and 316).
        keys, args = self.keys, self.args
        return b"".join(
            (
                b"*%d\r\n" % (3 + len(keys) + len(args)),
                _packed_name(self.script.sha),
                _packed_keys(*keys) if self.keys_recur else _pack(len(keys), *keys),
                _pack(*args),
            )
        )


class Announced(NamedTuple):
    """What a script has announced and settled: slot, time, ..., to be written into a wake index."""

    wake: str
    expires: int
    announced: Sequence[int]
    settled: Sequence[int]


def write_announcements(
    announced: Iterable[Announced], claimed: dict[tuple[str, str], bool]
) -> list[tuple[Any, ...]]:
    """Commands that write what scripts have announced into each wake index. The last change of an
    announcement wins.

    claimed: wake index and announcement of those that are not there; what is written or settled is
        removed from it

    Plain commands, for they take the node that wakes all workers a tenth of what a script takes;
    but for an index that expires.
    """
    # wake index, and when it expires -> announcement -> its time, or None if it is settled
    written: dict[tuple[str, int], dict[str, int | None]] = defaultdict(dict)
    for wake, expires, *changes in announced:
        # The script clears before it announces.
        for is_settled, pairs in zip((True, False), reversed(changes), strict=True):
            for slot, us in rows(pairs, 2):
                written[wake, expires][f"{slot}:{us}"] = None if is_settled else us
    if len(claimed) > 1000:  # of others that have died
        claimed.clear()
    commands: list[tuple[Any, ...]] = []
    for (wake, expires), times in written.items():
        settled = [m for m, us in times.items() if not claimed.pop((wake, m), us is not None)]
        flat = [part for member, us in times.items() if us is not None for part in (us, member)]
        if settled:
            commands.append(("ZREM", wake, *settled))
        if flat and expires:
            script = load("announce")
            commands.append(("EVAL", script.text, 1, wake, expires, *flat))
        elif flat:
            commands.append(("ZADD", wake, *flat))
    return commands


def pack_command(*parts: Any) -> bytes:
    """A command in Redis's protocol; each part is text, bytes or a number."""
    return b"*%d\r\n%b" % (len(parts), _pack(*parts))


def pieces(packed: bytes) -> Sequence[bytes | memoryview]:
    """A packed command in pieces, which redis-py sends one by one.

    A socket's timeout is for a whole call. In pieces, it is the longest silence.
    """
    if len(packed) <= PIECE:
        return (packed,)
    view = memoryview(packed)
    return [view[start : start + PIECE] for start in range(0, len(packed), PIECE)]


def patience_for(sent: int) -> float:
    """Seconds that a reply to this many bytes may take longer than usual: sent bytes may still be
    on their way."""
    return sent / SLOWEST if sent > PIECE else 0.0


class PageSize:
    """How many items of unknown size to read next: few at first, then as many as fit into `bytes`.

    most: the most items to read at once
    bytes: about how many bytes to read at once
    """

    def __init__(self, most: int, bytes: int) -> None:
        self._most = most
        self._bytes = bytes
        self.next = min(most, 8)

    def read(self, bytes: int) -> None:
        """The items that were read had this many bytes."""
        if bytes > self._bytes:
            self.next = max(self.next * self._bytes // bytes, 1)
        elif 4 * bytes < self._bytes:
            self.next = min(2 * self.next, self._most)


class Packer:
    """Packs commands for redis-py's connections (its `command_packer`), in pieces."""

    def pack(self, *parts: Any) -> Sequence[bytes | memoryview]:
        return pieces(pack_named(*parts))


def pack_named(name: Any, *parts: Any) -> bytes:
    """As :func:`pack_command`; the name may have several words, as redis-py's names have."""
    return pack_command(*(name.split() if isinstance(name, str) else (name,)), *parts)


def _pack(*parts: Any) -> bytes:
    packed = []
    for part in parts:
        kind = type(part)
        if kind is int:
            part = b"%d" % part
        elif kind is str:
            part = part.encode("utf-8", "surrogatepass")
        elif not isinstance(part, bytes):
            part = str(part).encode("utf-8", "surrogatepass")
        packed.append(b"$%d\r\n%b\r\n" % (len(part), part))
    return b"".join(packed)


@lru_cache
def _packed_name(sha: str) -> bytes:
    return _pack("EVALSHA", sha)


@lru_cache(maxsize=1024)
def _packed_keys(*keys: str) -> bytes:
    return _pack(len(keys), *keys)


class Countdown(NamedTuple):
    """A time that is a duration after the moment in which it was asked for, by Redis's clock.

    A script gets the microseconds that are left when the call is sent, not when this was made.
    """

    at_us: int | None  #: the same by Redis's clock, in microseconds, if the sender knows that clock
    ends: float  #: the moment by this process's monotonic clock, in seconds

    def __str__(self) -> str:
        left_us = round((self.ends - time.monotonic()) * 1_000_000)
        if left_us <= 0:
            return ""
        return f"{'' if self.at_us is None else self.at_us}+{left_us}"


def when_of(at_us: int | Countdown | None, delay_us: int | None) -> str | Countdown:
    """A time as the scripts read it: a moment, ``+`` and a duration from now, or nothing for now.

    Raises ActionTimeError beyond the year 2255, and for both.
    """
    if isinstance(at_us, Countdown):
        left_us = round((at_us.ends - time.monotonic()) * 1_000_000)
        scores.check(at_us.at_us or time.time_ns() // 1000 + left_us)
        return at_us
    if delay_us is not None:
        if at_us is not None:
            raise ActionTimeError("say when by at or by delay, not by both")
        if delay_us <= 0:
            return ""
        scores.check(time.time_ns() // 1000 + delay_us)  # exact enough to refuse the year 2255
        return f"+{delay_us}"
    return "" if at_us is None else str(scores.check(at_us))


def microseconds(seconds: float | None) -> int | None:
    """Seconds as microseconds. Raises ActionTimeError for a value that is no time."""
    if seconds is None:
        return None
    try:
        return round(seconds * 1_000_000)
    except (OverflowError, ValueError):
        raise ActionTimeError(f"{seconds!r} is not a time; choose another eta") from None
    except TypeError:
        raise ActionTimeError(
            f"{seconds!r:.100} is not a time: give a number of seconds; a timedelta has "
            "total_seconds(), a datetime timestamp()"
        ) from None


def text(raw: bytes) -> str:
    """Decode an id or a key."""
    return raw.decode("utf-8", "surrogatepass")


def as_bytes(text: str) -> bytes:
    """The inverse of :func:`text`; redis-py cannot encode half of a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")


def texts(raw: Iterable[bytes]) -> list[str]:
    return [text(item) for item in raw]


def rows(flat: Sequence[Any], width: int) -> Iterator[tuple[Any, ...]]:
    """The items of a flat list in a reply, so many together; without what is left at its end."""
    return zip(*[iter(flat)] * width, strict=False)


def parts_of(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Items, so many at a time."""
    return (items[start : start + most] for start in range(0, len(items), most))


def literal_pattern(text: str) -> str:
    """A Redis pattern that matches only this text."""
    return re.sub(r"([][*?\\^])", r"\\\1", text)


# -- names of calls, by which the server knows one that is repeated


class Names:
    """Names that no other call has: who makes it, a dot and a number. Of a maker, the server
    remembers the latest call."""

    __slots__ = ("_maker",)

    def __init__(self) -> None:
        #: process, its name, numbers
        self._maker: tuple[int, str, Iterator[int]] | None = None

    def next(self) -> str:
        maker = self._maker
        if maker is None or maker[0] != os.getpid():  # a forked child is another maker
            maker = self._maker = (os.getpid(), token_urlsafe(9), count(1))
        return f"{maker[1]}.{next(maker[2]):x}"


class FreeNames:
    """Gives each call that is under way a maker of its own. Any thread may ask."""

    def __init__(self) -> None:
        self._free: deque[Names] = deque()

    def take(self) -> Names:
        try:
            return self._free.pop()
        except IndexError:
            return Names()

    def give(self, names: Names) -> None:
        """The calls of this maker have ended: nothing of them will be repeated."""
        self._free.append(names)


def publish_of(name: str) -> tuple[str, str]:
    """Who has made a call, and its name."""
    return name.rpartition(".")[0], name
