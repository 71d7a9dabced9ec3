"""What is far ahead, in a task library of many rows: memory, loading, searches, lateness.

Arguments: ``fill`` or ``measure``, the broker's URL, the library's URL (PostgreSQL, one table), and
how many rows there are to be. Prints what it measured as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import kombu_toc

TOPIC = "celery"

#: Seconds over which the rows are due, evenly: 30 days. The first is due when they are filled in.
SPAN = 30 * 86_400

#: Seconds of the horizon while memory and lateness are measured, and while loading is.
NEAR, WIDE = 3600, 8 * 3600

#: Searches, and messages whose lateness is measured in so many seconds.
SEARCHES, MESSAGES, SECONDS = 200, 1000, 20

#: Rows that the database makes in one statement.
_TOGETHER = 1_000_000

_COLUMNS = (
    "id, token, topic, status, action_us, task, biz_type, biz_id, attempts, worker, error, "
    "created_us, modified_us, place, priority, basis, traits, body"
)


def fill(center: Any, number: int) -> dict[str, float]:
    """Rows over 30 days, made by the database: to send ten million takes long."""
    from sqlalchemy import text
    from sqlalchemy.schema import AddConstraint, CreateIndex

    began = time.perf_counter()
    center.library.create()
    store = center.recorder.recorder.store
    center.queues.declare(TOPIC, horizon=NEAR)
    store.declarations.note(TOPIC, center.registry.declared(TOPIC).declaration)
    database = store.shards.databases[0]
    pending = store.shards.all[0].tables.pending
    indexes = sorted(pending.indexes, key=lambda index: str(index.name))

    def run(statement: Any) -> None:
        def work(connection: Any) -> None:
            connection.exec_driver_sql("SET maintenance_work_mem = '1GB'")
            connection.execute(text(statement) if isinstance(statement, str) else statement)

        database.run_single(work)

    # All at once is faster than row by row.
    run(f"ALTER TABLE {pending.name} DROP CONSTRAINT {pending.name}_pkey")
    for index in indexes:
        run(f"DROP INDEX {index.name}")
    now = time.time_ns() // 1000
    step = SPAN * 1_000_000 // number
    for start in range(0, number, _TOGETHER):
        last = min(start + _TOGETHER, number) - 1
        run(
            f"INSERT INTO {pending.name} ({_COLUMNS}) SELECT gen_random_uuid()::text, "
            f"lpad(to_hex(n), 8, '0'), '{TOPIC}', 0, {now} + n::bigint * {step}, 'shop.expire', "
            f"'order', (n * 7919 % {number})::text, 0, NULL, NULL, {now}, {now}, 2, 0, NULL, '', "
            "decode(repeat(md5(n::text), 10), 'hex') "
            f"FROM generate_series({start}::bigint, {last}) AS n"
        )
    run(AddConstraint(pending.primary_key))
    for index in indexes:
        run(CreateIndex(index))
    run(f"VACUUM ANALYZE {pending.name}")
    size = database.read(text("SELECT pg_database_size(current_database()) AS bytes"))
    return {
        "fill_seconds": time.perf_counter() - began,
        "bytes_per_row": size[0]["bytes"] / number,
    }


def measure(center: Any, number: int) -> dict[str, float]:
    from kombu_toc.library.horizon import FarStore, Loader
    from kombu_toc.library.putting import Putter

    store = center.recorder.recorder.store
    far = FarStore(store)

    def loader() -> Loader:
        return Loader(far, Putter(store, center), lambda rows: None)

    def load() -> tuple[int, float]:
        one, began = loader(), time.perf_counter()
        while one.turn(time.monotonic() + 600):
            pass
        return one.loaded, time.perf_counter() - began

    found: dict[str, float] = {"rows": float(number)}
    found["memory_empty"] = _memory(center)
    found["near"] = float(load()[0])
    found["memory_near"] = _memory(center)
    found.update(_searches(center, store, number))
    found["by_id"] = _by_id(center, far)
    found.update(_lateness(center, far, loader()))
    center.queues.alter(TOPIC, horizon=WIDE)
    loaded, took = load()
    found["loaded"] = float(loaded)
    found["load"] = loaded / took
    found["memory_wide"] = _memory(center)
    return found


def _memory(center: Any) -> float:
    return center.client.info("memory")["used_memory"] / 1e6


def _searches(center: Any, store: Any, number: int) -> dict[str, float]:
    """Milliseconds of the database for a search by business id, by its own clock."""
    from sqlalchemy import event

    asked: list[tuple[str, Any]] = []

    def note(_: Any, __: Any, statement: str, values: Any, *___: Any) -> None:
        if statement.startswith("SELECT") and "biz_id = " in statement:
            asked.append((statement, values))

    engine = store.shards.databases[0]._single
    event.listen(engine, "before_cursor_execute", note)
    for one in range(SEARCHES):
        page = center.library.find(biz_type="order", biz_id=str(one * 104_729 % number))
        assert len(page.records) == 1, page
    event.remove(engine, "before_cursor_execute", note)
    times: list[float] = []
    with engine.connect() as connection:
        for statement, values in asked:
            plan = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values
            ).scalar()
            times.append(plan[0]["Planning Time"] + plan[0]["Execution Time"])
    # A search asks what has not ended, and history.
    each = [sum(pair) for pair in zip(times[::2], times[1::2], strict=True)]
    return {"find_p50": _quantile(each, 0.5), "find_max": max(each)}


def _by_id(center: Any, far: Any) -> float:
    """Milliseconds to find a far message by its id, with the ways to Redis and to the database."""
    rows = far.read(TOPIC, ((time.time_ns() // 1000) + WIDE * 1_000_000, "", ""), None, None, 50)
    ids = [next(rows).id for _ in range(50)]
    times = []
    for id in ids:
        began = time.perf_counter()
        [found] = center.get(id)
        times.append(time.perf_counter() - began)
        assert found.far
    return 1000 * _quantile(times, 0.5)


def _lateness(center: Any, far: Any, loader: Any) -> dict[str, float]:
    """Milliseconds after its time at which a message is delivered that was put directly, and one
    that was far ahead, while what is far ahead is looked after."""
    found = {}
    for name, is_far in (("direct", False), ("far", True)):
        topic = f"late-{name}"
        center.queues.declare(topic, horizon=NEAR if is_far else None, slots=8)
        begin = time.time() + 5
        step = SECONDS / MESSAGES
        dues = {f"{name}-{begin:.0f}-{n}": begin + n * step for n in range(MESSAGES)}
        stopping = threading.Event()
        if is_far:
            far.store.declarations.note(topic, center.registry.declared(topic).declaration)
            far.store.insert([_row(id, topic, due) for id, due in dues.items()])
            keeping = threading.Thread(target=_keep, args=(loader, stopping))
            keeping.start()
        else:
            center.put_many(
                topic, [{"id": i, "body": b"x" * 160, "at": t} for i, t in dues.items()]
            )
        late = []
        with center.consume(topic) as messages:
            for message in messages:
                late.append(1000 * (time.time() - dues[message.id]))
                if len(late) == MESSAGES:
                    break
        stopping.set()
        if is_far:
            keeping.join()
        assert min(late) > -1, min(late)
        found[f"late_{name}_p50"] = _quantile(late, 0.5)
        found[f"late_{name}_p99"] = _quantile(late, 0.99)
    return found


def _row(id: str, topic: str, due: float) -> Any:
    from kombu_toc.library.records import Row, now_us

    now = now_us()
    return Row(
        *(id, "00000000", topic, 0, int(due * 1e6), "shop.expire", None, None, 0, None, None),
        *(now, now, 2, 0, None, "", b"x" * 160),
    )


def _keep(loader: Any, stopping: threading.Event) -> None:
    while not stopping.is_set():
        if not loader.turn(time.monotonic() + 60):
            stopping.wait(0.5)


def _quantile(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


if __name__ == "__main__":
    what, broker, library, rows = sys.argv[1:]
    opened = kombu_toc.center_for(broker, toc_library=library, toc_library_timeout=600)
    print(json.dumps({"fill": fill, "measure": measure}[what](opened, int(rows))))
