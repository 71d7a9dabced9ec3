"""The ways in which a queue may be kept in the task library, under deaths between any two steps
(`tests.chaos.steps`): how it is declared and sent to, and what each promises beyond the others.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import sqlalchemy
from kombu import Producer
from sqlalchemy import event
from sqlalchemy.pool import NullPool

from kombu_toc import LIBRARY_TERMS, outbox
from kombu_toc.client.options import DatabaseURL, read_databases
from kombu_toc.library import deferred, guard, statuses
from kombu_toc.library import horizon as loader
from kombu_toc.library.horizon import FarStore
from kombu_toc.library.keeper import Keeper
from kombu_toc.library.shards import Shards
from kombu_toc.library.store import Store
from kombu_toc.model.limits import LIMITS, Number

from ..support.library import create_tables

if TYPE_CHECKING:
    from .steps import Chaos

QUEUE = "mail"


def make_library(urls: list[str], tables: int = 1) -> dict[str, Any]:
    """Make the tables in empty databases; return the options that name them."""
    create_tables(urls, tables)
    return {"toc_library": urls, "toc_library_tables": tables}


class Way:
    """As a queue is kept by default: ``through``. What others have in common."""

    #: how the queue is declared
    terms: Mapping[str, Any] = {}
    #: milliseconds ahead that messages are sent
    delays = (0, 0, 200, 1000)
    #: how many databases the library may have at most
    databases = 2
    #: the most steps that a keeper lives to take
    keeper_steps = 24

    def __init__(self, chaos: Chaos, options: Mapping[str, Any]) -> None:
        self._chaos = chaos
        #: what was broken beyond what is promised of all
        self.broken: list[str] = []
        #: the library, seen by somebody else
        tables = options.get("toc_library_tables", 1)
        self._shards = Shards(read_databases("toc_library", options["toc_library"]), tables, 30.0)
        self._store = Store(self._shards)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hurry up what waits for others, for one life goes on at a time."""
        try:
            yield
        finally:
            self._shards.close()

    def declare(self, center: Any) -> None:
        if self.terms:
            center.queues.declare(QUEUE, **self.terms)

    def send(self, producer: Producer, id: str, ms: int) -> bool:
        """Send a message; return whether it is sent."""
        self.publish(producer, id, ms)
        return True

    def publish(self, producer: Producer, id: str, ms: int) -> None:
        headers = {"id": id, "task": "t", "x-delay": ms}
        checksum = zlib.crc32(id.encode())
        if checksum % 2:
            headers["x-biz-id"] = f"customer-{checksum % 7}"
        producer.publish({}, routing_key=QUEUE, headers=headers)

    def keep(self, keeper: Keeper) -> None:
        """Do what the elected process does for this way alone."""

    def said(self, ids: list[str]) -> None:
        """It was said that these have ended."""

    def losing(self) -> None:
        """Redis is about to lose everything."""

    def promised(self) -> set[str]:
        """What must have run."""
        return self._chaos.sent

    def judge(self) -> None:
        """Note what else is broken."""

    def counted(self) -> dict[str, int]:
        """What shows that this way was gone."""
        return {}


class Outbox(Way):
    """The row is committed with the caller's own, or neither is there."""

    terms: Mapping[str, Any] = {"library": "outbox"}

    def __init__(self, chaos: Chaos, options: Mapping[str, Any]) -> None:
        super().__init__(chaos, options)
        url = options["toc_library"][0]
        self._engine = sqlalchemy.create_engine(DatabaseURL(url).reveal(), poolclass=NullPool)
        with self._engine.begin() as connection:
            connection.execute(sqlalchemy.text("CREATE TABLE orders (id VARCHAR(64) PRIMARY KEY)"))

    @contextmanager
    def installed(self) -> Iterator[None]:
        passes = self._chaos.fate.passes
        for name, what in (
            ("before_cursor_execute", "before an outbox's statement"),
            ("after_cursor_execute", "after an outbox's statement"),
        ):
            event.listen(self._engine, name, lambda *_, what=what: passes(what))
        with super().installed():
            yield

    def send(self, producer: Producer, id: str, ms: int) -> bool:
        passes, text = self._chaos.fate.passes, sqlalchemy.text
        with self._engine.connect() as connection:
            transaction = connection.begin()
            with outbox(connection):
                connection.execute(text("INSERT INTO orders (id) VALUES (:id)"), {"id": id})
                self.publish(producer, id, ms)
            if self._chaos.dice.random() < 0.2:
                transaction.rollback()
                return False
            passes("before a commit")
            transaction.commit()
            passes("after a commit")
        return True

    def promised(self) -> set[str]:
        """What the application's own table has: nothing else is known of a sender that died."""
        with self._engine.connect() as connection:
            return set(connection.execute(sqlalchemy.text("SELECT id FROM orders")).scalars())

    def judge(self) -> None:
        for id in sorted(self._chaos.ran.keys() - self.promised()):
            self.broken.append(f"{id} has run, and its transaction was not committed")

    def counted(self) -> dict[str, int]:
        return {"committed": len(self.promised())}


class Behind(Way):
    """Rows are written after the messages. What has none when Redis loses everything is lost; of
    what was sent before the recorder had its turn, nothing is."""

    terms: Mapping[str, Any] = {"library": "behind"}
    #: most of it waits for longer than until the next turn
    delays = (0, 500, 1500, 3000)
    #: each slot's log is a step to read
    keeper_steps = 80

    def __init__(self, chaos: Chaos, options: Mapping[str, Any]) -> None:
        super().__init__(chaos, options)
        #: what had no row when Redis lost everything
        self.missing: set[str] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        with (
            mock.patch.object(deferred, "AGE_MS", 0),
            mock.patch.object(deferred, "RELOAD", 0.0),
            super().installed(),
        ):
            yield

    def keep(self, keeper: Keeper) -> None:
        while keeper._behind.turn():
            pass
        for id in sorted(self._chaos.aside(self._without_row)):
            self.broken.append(f"{id} has no row after the recorder's turn")

    def losing(self) -> None:
        self.missing |= self._without_row()

    def _without_row(self) -> set[str]:
        """What waits, and has no row."""
        waits = self._chaos.sent - self._chaos.ran.keys() - self.missing
        return waits - {row.id for row in self._store.of_ids(sorted(waits))}

    def promised(self) -> set[str]:
        return self._chaos.sent - self.missing

    def counted(self) -> dict[str, int]:
        return {"no row yet": len(self.missing)}


class Guard(Way):
    """What has ended is not run again, also if it is sent again under its id."""

    terms: Mapping[str, Any] = {"guard": True}

    def __init__(self, chaos: Chaos, options: Mapping[str, Any]) -> None:
        super().__init__(chaos, options)
        #: how often they had run when it was said that they had ended
        self._ended: dict[str, int] = {}
        self.sent_again = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        with mock.patch.object(guard, "IDLE", 0.05), super().installed():
            yield

    def send(self, producer: Producer, id: str, ms: int) -> bool:
        if self._ended and self._chaos.dice.random() < 0.5:
            self.sent_again += 1
            self.publish(producer, self._chaos.dice.choice(sorted(self._ended)), 0)
        return super().send(producer, id, ms)

    def said(self, ids: list[str]) -> None:
        for id in ids:
            self._ended.setdefault(id, self._chaos.ran[id])

    def judge(self) -> None:
        for id, number in self._ended.items():
            if self._chaos.ran[id] > number:
                self.broken.append(f"{id} has run again, although it was said that it had ended")

    def counted(self) -> dict[str, int]:
        return {"sent again": self.sent_again}


class Far(Way):
    """What is further ahead than the horizon is in the library only; and nothing that is within it
    after the loader's turn: that is in Redis."""

    #: seconds
    horizon = 0.4
    terms: Mapping[str, Any] = {"horizon": horizon}
    delays = (0, 200, 700, 1500, 3000)

    def __init__(self, chaos: Chaos, options: Mapping[str, Any]) -> None:
        super().__init__(chaos, options)
        #: what was far ahead when it was sent, and what of it Redis may have lost
        self._far: set[str] = set()
        self._lost: set[str] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        shorter = {"horizon": Number(float, 0.1, unit="seconds")}
        with ExitStack() as stack:
            for terms in (LIBRARY_TERMS, LIMITS):
                stack.enter_context(mock.patch.dict(terms, shorter))
            for name in ("LOOK_INTERVAL", "ALL_INTERVAL"):
                stack.enter_context(mock.patch.object(loader, name, 0.0))
            stack.enter_context(super().installed())
            yield

    def send(self, producer: Producer, id: str, ms: int) -> bool:
        super().send(producer, id, ms)
        rows = self._chaos.aside(self._store.of_ids, [id])
        self._far.update(row.id for row in rows if row.place == statuses.FAR)
        return True

    def keep(self, keeper: Keeper) -> None:
        until_us = round((time.time() + self.horizon) * 1e6)
        while keeper._loader.turn(time.monotonic() + 10):
            pass
        for row in self._chaos.aside(self._far_until, until_us):
            self.broken.append(f"{row.id} is still far ahead after the loader's turn")
        for id in self._chaos.aside(self._not_there, keeper.center):
            self.broken.append(f"{id} is not far ahead any more, and not in Redis")

    def losing(self) -> None:
        self._lost |= self._far

    def _not_there(self, center: Any) -> list[str]:
        """What was loaded, has not run, and is not in Redis."""
        waits = sorted(self._far - self._lost - self._chaos.ran.keys())
        loaded = {row.id for row in self._store.of_ids(waits) if row.place == statuses.IN_REDIS}
        there = {one.id for one in center.get(sorted(loaded))} if loaded else set()
        return sorted(loaded - there)

    def _far_until(self, us: int) -> list[Any]:
        return list(FarStore(self._store).read(QUEUE, (0, "", ""), None, us, 1000))

    def counted(self) -> dict[str, int]:
        return {"far ahead": len(self._far)}


WAYS: dict[str, type[Way]] = {
    "through": Way,
    "outbox": Outbox,
    "behind": Behind,
    "guard": Guard,
    "far": Far,
}
