"""Sends again what went wrong: what has failed, from the record; dead letters, from DeadQueue."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex

from sqlalchemy import Connection, RowMapping, or_, select, update

from ..center.center import TimeoutCenter
from ..errors import EnvelopeError
from ..model import message
from ..model.delivery import token_with
from ..model.library import Record, Retried
from ..model.results import Found
from . import outbox, statuses
from .outcomes import DAY_US, KEY
from .records import Kept, Key, Row, key_of, now_us, texts_of
from .shards import Shard
from .store import Store

#: Seconds for which a process may stand still while it sends some again.
LOCKED = 30.0

#: Letters of the traits that a message keeps: when it expires, and the name of its put, are others.
_TRAITS = "vmkuo"


def retry(store: Store, center: TimeoutCenter, records: Sequence[Record]) -> Retried:
    """Send again what failed, as far as that was not done yet: each once, whoever else does it.
    Raises LibraryError."""
    done = Retried(0, 0)
    failed, dead = statuses.NAMES[statuses.FAILED], statuses.NAMES[statuses.DEAD]
    wrong = [one for one in records if one.status == failed]
    for shard, some in store.shards.divided(wrong, _key_of).items():
        one = _retry_failed(store, shard, some)
        done = Retried(done.number + one.number, done.not_kept + one.not_kept)
    by_topic: dict[str, set[Key]] = {}
    for record in records:
        if record.status == dead:
            key = (record.id, record.token, record.topic)
            by_topic.setdefault(record.topic, set()).add(key)
    for topic, keys in by_topic.items():

        def is_meant(one: Found, keys: set[Key] = keys) -> bool:
            return key_of(one.topic, one.id, one.body, one.token) in keys

        ids = sorted({id for id, _, _ in keys})
        number = center.dead.requeue(topic, ids=ids, where=is_meant)
        done = done._replace(number=done.number + number)
    return done


def _key_of(record: Record) -> Key:
    return record.id, record.token, record.topic


def _retry_failed(store: Store, shard: Shard, records: Sequence[Record]) -> Retried:
    """In one transaction: the records are of what was retried from then on, and what is sent again
    has rows, which whoever looks after the library puts."""
    history, dialect = shard.tables.history, shard.database.dialect
    key = [history.c[name] for name in (*KEY, "day")]
    columns = [*key, *(history.c[name] for name in ("created_us", *Kept._fields))]
    which = or_(
        *(
            (history.c.id == one.id)
            & (history.c.token == one.token)
            & (history.c.topic == one.topic)
            & (history.c.day == one.modified_us // DAY_US)
            for one in records
        )
    )
    wanted = select(*columns).where(which, history.c.status == statuses.FAILED)

    def work(connection: Connection) -> Retried:
        dialect.lock(connection, LOCKED)
        now, rows, not_kept = now_us(), [], 0
        for found in connection.execute(dialect.locking(wanted)).mappings().all():
            row = None if found["body"] is None else _again(found, now)
            if row is None:
                not_kept += 1
                continue
            rows.append(row)
            mine = [column == found[column.name] for column in key]
            # The day in which it failed is where its record is: so that stays its time.
            values = {"status": statuses.RETRIED, "body": None}
            connection.execute(update(history).where(*mine).values(**values))
        if rows:
            insert = dialect.insert_missing(shard.tables.pending)
            outbox.write(connection, shard.tables.pending, insert, rows)
        return Retried(len(rows), not_kept)

    return shard.database.run(work)


def _again(found: RowMapping, now: int) -> Row | None:
    """The row of what is sent again: due now, another message of its id."""
    id, topic = found["id"], found["topic"]
    try:
        content = message.unpack(found["body"], id)
    except EnvelopeError:
        return None
    headers = content["headers"]
    token = token_with(token_hex(8), headers)
    headers.pop(message.SCHEDULE, None)
    if headers.get("expires"):
        headers["expires"] = None
    content["properties"].update(k=token)
    content["properties"].pop("expiration", None)
    task, kind, biz, attributes = texts_of(headers)
    traits = [one for one in found["traits"][1:].split(",") if one and one[0] in _TRAITS]
    return Row(
        *(id, token, topic, statuses.PENDING, now, task, kind, biz),
        *(0, None, None, now, now, statuses.NOT_PUT, found["priority"], found["basis"]),
        traits=f";{','.join(traits)}" if traits else "",
        body=message.pack(content, deflate=True, id=id),
        attributes=attributes,
    )
