"""Lists what has failed, and sends it again from the record; dead letters, from DeadQueue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from secrets import token_hex
from typing import Any

from sqlalchemy import Connection, RowMapping, Table, func, or_, select, text, tuple_, update

from ..center.center import TimeoutCenter
from ..model import message
from ..model.delivery import token_with
from ..model.failures import FailedTask, FailuresRetried, again, traits_again
from ..model.library import Record
from ..model.results import Found
from . import outbox, statuses
from .outcomes import DAY_US, KEY
from .records import Kept, Key, Row, content_of, key_of, now_us, texts_of
from .schema import HAS_FAILED
from .search import of_tables
from .shards import Database, Shard, chunks
from .store import Store

#: Seconds for which a process may stand still while it sends some again.
LOCKED = 30.0

#: Characters of an error and of arguments that are listed.
_LISTED = 1000


@dataclass(eq=False)
class FailedRows:
    """As :class:`.center.core.FailedRows`.

    hides: whether arguments and errors are not told, for the app hides some
    """

    store: Store
    hides: bool

    def latest(
        self, topic: str | None, since_us: int, until_us: int, after: FailedTask | None, limit: int
    ) -> list[FailedTask]:
        shards = self.store.shards
        history = shards.all[0].tables.history
        columns = history.c
        which = [columns.modified_us.between(since_us, until_us), *_listed(history)]
        which += [] if topic is None else [columns.topic == topic]
        key = columns.topic, columns.id, columns.token
        if after is not None:
            earlier = columns.modified_us < after.failed_us
            behind = tuple_(*key) > (after.topic, after.id, after.token)
            which += [columns.modified_us <= after.failed_us, earlier | behind]
        heads = _selecting(history, func.substr(columns.error, 1, _LISTED)).where(*which)
        statement = heads.order_by(columns.modified_us.desc(), *key).limit(limit)
        types = {column.name: column.type for column in statement.selected_columns}
        order = "modified_us DESC, topic, id, token"

        def look(database: Database) -> list[FailedTask]:
            some = shards.of_database(database)
            statements: Iterable[Any] = (shard.own(statement) for shard in some)
            if database.dialect.name != "mysql":  # as in search
                tables = [shard.tables.history for shard in some]
                statements = of_tables(database, statement, tables, types, order, limit)
            return [self._failed_task(row) for one in statements for row in database.read(one)]

        found = [one for some in shards.asked(look) for one in some]
        return sorted(found, key=lambda one: (-one.failed_us, one.topic, one.id, one.token))[:limit]

    def of_ids(self, ids: Iterable[str], known: Iterable[FailedTask] = ()) -> list[FailedTask]:
        shards = self.store.shards
        history = shards.all[0].tables.history
        whole = _selecting(history, history.c.error, history.c.body)
        places = self.store.locator.shards_of(ids, map(_key_of, known))

        def look(database: Database) -> list[FailedTask]:
            return [
                self._failed_task(row)
                for shard, some in places.items()
                if shard.database is database
                for chunk in chunks(some)
                for row in database.read(
                    shard.own(whole.where(history.c.id.in_(chunk), *_listed(history)))
                )
            ]

        answers = shards.asked(look, {shard.database for shard in places})
        found = [one for some in answers for one in some]
        return sorted(found, key=lambda one: one.failed_us)

    def send_again(self, failed: Sequence[FailedTask]) -> FailuresRetried:
        return _retry_each(self.store, [(_key_of(one), one.failed_us) for one in failed])

    def forget(self, failed: Sequence[FailedTask]) -> None:
        for shard, some in self.store.shards.divided(failed, _key_of).items():
            history = shard.tables.history
            which = _are(history, [(_key_of(one), one.failed_us) for one in some])
            shard.database.execute(update(history).where(which, *_listed(history)).values(body=b""))

    def _failed_task(self, row: RowMapping) -> FailedTask:
        error, body = row["error"] or "", row.get("body") or b""
        exception = error.partition("\n")[0].partition(":")[0]
        content = content_of(body, row["id"])
        headers = {} if content is None else content["headers"]
        args = " ".join(str(headers.get(name) or "") for name in ("argsrepr", "kwargsrepr"))
        return FailedTask(
            *(row["id"], row["topic"], row["task"] or "", exception, row["modified_us"]),
            error=exception if self.hides else error,
            args="" if self.hides else args[:_LISTED].strip(),
            worker=row["worker"] or "",
            retries=headers.get("retries") or 0,
            masked=self.hides,
            has_message=bool(row["has_message"]),
            kept_id=row["id"],
            message=b"" if self.hides else body,
            token=row["token"],
        )


def _listed(history: Table) -> list[Any]:
    """WHERE clauses of what has failed and is listed: what was forgotten has an empty message."""
    return [text(HAS_FAILED), func.coalesce(func.length(history.c.body), 1) > 0]


def _selecting(history: Table, error: Any, *more: Any) -> Any:
    names = ("id", "topic", "token", "task", "worker", "modified_us")
    has_message = history.c.body.is_not(None).label("has_message")
    return select(*(history.c[name] for name in names), error.label("error"), has_message, *more)


def _are(history: Table, keys: Iterable[tuple[Key, int]]) -> Any:
    """WHERE clause of the records with these keys, which ended at these times."""
    columns = history.c
    return or_(
        *(
            (columns.id == id)
            & (columns.token == token)
            & (columns.topic == topic)
            & (columns.day == at_us // DAY_US)
            for (id, token, topic), at_us in keys
        )
    )


def retry(store: Store, center: TimeoutCenter, records: Sequence[Record]) -> FailuresRetried:
    """Send again what failed, as far as that was not done yet: each once, whoever else does it.
    Raises LibraryError."""
    dead = statuses.NAMES[statuses.DEAD]
    wrong = [(_key_of(one), one.modified_us) for one in records if one.status != dead]
    done = _retry_each(store, wrong)
    by_topic: dict[str, set[Key]] = {}
    for record in records:
        if record.status == dead:
            key = (record.id, record.token, record.topic)
            by_topic.setdefault(record.topic, set()).add(key)
    for topic, keys in by_topic.items():

        def is_meant(one: Found, keys: set[Key] = keys) -> bool:
            return key_of(one) in keys

        ids = sorted({id for id, _, _ in keys})
        number = center.dead.requeue(topic, ids=ids, where=is_meant)
        done = done._replace(number=done.number + number)
    return done


def _key_of(record: Record | FailedTask) -> Key:
    return record.id, record.token or "", record.topic


def _retry_each(store: Store, ended: Sequence[tuple[Key, int]]) -> FailuresRetried:
    """Send again what has failed at these times, each once."""
    done = FailuresRetried()
    for shard, some in store.shards.divided(ended, itemgetter(0)).items():
        done = done.plus(_retry_failed(store, shard, some))
    return done


def _retry_failed(store: Store, shard: Shard, keys: Sequence[tuple[Key, int]]) -> FailuresRetried:
    """In one transaction: the records are of what was retried from then on, and what is sent again
    has rows, which whoever looks after the library puts."""
    history, dialect = shard.tables.history, shard.database.dialect
    key = [history.c[name] for name in (*KEY, "day")]
    columns = [*key, *(history.c[name] for name in ("created_us", *Kept._fields))]
    wanted = select(*columns).where(_are(history, keys), history.c.status == statuses.FAILED)

    def work(connection: Connection) -> FailuresRetried:
        dialect.lock(connection, LOCKED)
        now, rows, done = now_us(), [], FailuresRetried()
        for found in connection.execute(dialect.locking(wanted)).mappings().all():
            made = _again(found, now)
            done = done.plus(FailuresRetried(not_kept=1) if made is None else made[1])
            if made is None:
                continue
            rows.append(made[0])
            mine = [column == found[column.name] for column in key]
            # The day in which it failed is where its record is: so that stays its time.
            values = {"status": statuses.RETRIED, "body": None}
            connection.execute(update(history).where(*mine).values(**values))
        if rows:
            insert = dialect.insert_missing(shard.tables.pending)
            outbox.write(connection, shard.tables.pending, insert, rows)
        return done

    return shard.database.run(work)


def _again(found: RowMapping, now: int) -> tuple[Row, FailuresRetried] | None:
    """The row of what is sent again: due now, another message of its id; and what was taken away
    from it. None: its message is not kept."""
    id, topic = found["id"], found["topic"]
    content = content_of(found["body"] or b"", id)
    if content is None:
        return None
    headers = content["headers"]
    token = token_with(token_hex(8), headers)
    done = again(content, now / 1e6)
    content["properties"].update(k=token)
    task, kind, biz, attributes = texts_of(headers)
    row = Row(
        *(id, token, topic, statuses.PENDING, now, task, kind, biz),
        *(0, None, None, now, now, statuses.NOT_PUT, found["priority"], found["basis"]),
        traits=traits_again(found["traits"]),
        body=message.pack(content, deflate=True, id=id),
        attributes=attributes,
    )
    return row, done
