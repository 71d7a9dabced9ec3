"""What the task library does without Celery; prints what it measured as JSON.

Arguments: what, the broker's URL, the library's URL, and numbers.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from typing import Any

import kombu_toc

#: Messages in one list of put_many, and rows that are written together.
TOGETHER = 10_000


def create(center: Any, _: str) -> dict[str, float]:
    """Make the tables."""
    return {"made": float(len(center.library.create()))}


def put_many(center: Any, _: str, number: int) -> dict[str, float]:
    """Messages a second that are put by lists, each with a row."""
    begin = time.time() + 86_400
    messages = [
        {"id": str(uuid.uuid4()), "body": b"%0200d" % n, "at": begin + n * 7919 % 3600}
        for n in range(number)
    ]
    center.put_many("warm-up", messages[:100])
    before = center.library.counts().get("pending", 0)
    began = time.perf_counter()
    for start in range(0, number, TOGETHER):
        center.put_many("many", messages[start : start + TOGETHER])
    took = time.perf_counter() - began
    if center.library.counts().get("pending", 0) - before < number:
        return {}  # it writes no rows: nothing to compare
    return {"put_many": number / took}


def _rows(number: int, first: int = 0) -> list[Any]:
    """Rows of tasks that are due over an hour, in no order."""
    from kombu_toc.library.records import Row, now_us

    now = now_us()
    return [
        Row(
            *(str(uuid.uuid4()), f"{n:011x}", "celery", 0),
            *(now + 86_400_000_000 + n * 7919 % 3600 * 1_000_000 + n, "bench.tick", "order"),
            *(str(n), 0, None, None, now, now, 0, 0, None, "", os.urandom(160)),
        )
        for n in range(first, first + number)
    ]


def _store(url: str) -> Any:
    from kombu_toc.client.options import read_databases
    from kombu_toc.library.shards import Shards
    from kombu_toc.library.store import Store

    return Store(Shards(read_databases("toc_library", [url]), 1, 600.0))


def settle(center: Any, _: str, number: int) -> dict[str, float]:
    """Return when it is written that so many tasks are done, and nothing else is to be written."""
    while center.library.counts().get("done", 0) < number or any(
        one.entries for one in center.queues.unwritten()
    ):
        time.sleep(0.3)  # the worker writes it, in its own time
    return {}


def rebuild(center: Any, url: str, number: int) -> dict[str, float]:
    """Rows a second that are put into an empty Redis."""
    store = _store(url)
    for start in range(0, number, TOGETHER):
        store.insert(_rows(min(TOGETHER, number - start), start))
    began = time.perf_counter()
    done = center.library.rebuild()
    took = time.perf_counter() - began
    assert done.put == number, done
    return {"rebuild": number / took}


if __name__ == "__main__":
    what, broker, library, *numbers = sys.argv[1:]
    opened = kombu_toc.center_for(broker, toc_library=library, toc_library_timeout=600)
    does = (create, put_many, settle, rebuild)
    do = {one.__name__: one for one in does}[what]
    print(json.dumps(do(opened, library, *map(int, numbers))))
