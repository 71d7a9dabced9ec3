"""What the task library asks of its databases: whoever outgrows one must be able to go on."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from kombu_toc import ConfigurationError, EmbeddedServer, center_for
from kombu_toc.client.options import read, read_databases
from kombu_toc.library import migrate, statuses
from kombu_toc.library.outcomes import DAY_US
from kombu_toc.library.shards import Shards
from kombu_toc.library.store import Store

from ..support.inspection import put_some
from ..support.library import close_libraries, status_of

pytestmark = [pytest.mark.every_engine, pytest.mark.usefixtures("client")]

#: The tables of a shard, and their partitions.
OURS = re.compile(r"\btoc_(?:pending|history)_(\d+)")


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Every statement that this process sends to a database."""
    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield statements
    event.remove(Engine, "before_cursor_execute", note)


def test_every_change_meets_one_shard_and_nothing_particular_is_asked_for(
    server, client, store: Store, options, said: list[str], new_url: Callable[[], str]
):
    fresh = Shards(read_databases("toc_library", [new_url()]), 2, 5.0)
    migrate.create(fresh)
    fresh.close()
    recorded = center_for(server.toc_url, **options)
    recorded.queues.declare("mail", guard=True)
    ids = [f"task-{number}" for number in range(40)]
    at = time.time() + 600
    recorded.put("mail", "one", b"1", delay=600)
    recorded.put_many("mail", [(id, id.encode(), at) for id in ids])
    recorded.put_many("mail", [(f"due-{number}", b"", None) for number in range(20)])
    popped = recorded.pop("mail", limit=20).messages
    recorded.ack(popped[:10])
    recorded.bury(popped[10], reason="no use")
    recorded.release(popped[11:])
    for id in ids[:5]:
        assert recorded.reschedule(id, delay=60)[0].moved
    recorded.cancel(ids[:5])
    recorded.recorder.recorder.flush()
    library = recorded.library
    library.find(status="pending", between=(0, at + 9), limit=5)
    library.find(biz_id="42", biz_type="order")
    library.history("task-1")
    library.counts()
    client.flushall()
    library.rebuild()
    list(library.check(fix=True))
    recorded.queues.purge("mail")
    for shard in store.shards.all:
        list(store.pruning(shard, int(time.time() * 1e6) // DAY_US + 9))
    assert len(said) > 80
    # Alembic's own record is as it makes it.
    for statement in (one for one in said if "toc_library_version" not in one):
        # What is not looked for by a business id may be asked of some tables together.
        assert statement.startswith("SELECT") or len(set(OURS.findall(statement))) <= 1, statement
        assert not re.search(r"\b(RETURNING|SERIAL|SEQUENCE|AUTO_INCREMENT|nextval)\b", statement)
    history = [one for one in said if re.search(r"\bDELETE\b.*\btoc_history", one)]
    partitioned = store.shards.databases[0].dialect.name != "sqlite"
    assert partitioned != bool(history)


def test_a_row_is_where_the_crc_32_of_its_id_says(server, store: Store, options):
    recorded = center_for(server.toc_url, **options)
    recorded.queues.declare("mail")
    ids = [f"task-{number}" for number in range(30)] + ["\u00fc-9", "\U0001f642"]
    put_some(recorded, "mail", ids, body=b"1", delay=600)
    for number, shard in enumerate(store.shards.all):
        found = shard.database.read(shard.tables.pending.select())
        expected = {id for id in ids if zlib.crc32(id.encode()) % 4 == number}
        assert {row["id"] for row in found} == expected


def test_numbers_that_others_read_stay_as_they_are():
    """Rows outlive releases, and people ask for them with SQL."""
    live, over = ["pending", "taken"], ["done", "succeeded", "retried", "cancelled", "revoked"]
    numbers = {name: at for at, name in enumerate([*live, *over, "expired", "failed", "dead"])}
    assert numbers == statuses.NUMBERS
    assert read({}, {}).toc_library_retention == 30 * 86_400


def test_the_embedded_server_has_its_library_beside_its_data(tmp_path: Path):
    """Its data is deleted, but for the library: all comes back."""
    url = f"toc+embedded://{tmp_path / 'data'}?toc_library=on"
    center = center_for(url)
    center.queues.declare("mail")
    put_some(center, "mail", 20, "task-", b"1", delay=600)
    center.client.flushall()
    assert center.library.rebuild().put == 20
    assert len(center.scan("mail").messages) == 20
    assert (tmp_path / "data" / "library.db").exists()
    center.cancel("task-0")
    close_libraries()
    again = center_for(url)
    assert status_of(again.library, "task-0") == ["cancelled"]
    assert len(again.library.find(status="pending", limit=50).records) == 19
    close_libraries()
    for one in (center, again):
        one.client.close()
    EmbeddedServer.join(str(tmp_path / "data")).leave()
    with pytest.raises(ConfigurationError, match="elsewhere name a database"):
        center_for("toc+redis://127.0.0.1/0?toc_library=on")
