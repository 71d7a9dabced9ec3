"""Sends 1,000 tasks, loses Redis, puts them back from the task library, and runs them all on time.

It needs no server: one from a wheel is started, and stopped in the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from celery import Celery

import celery_toc

TASKS = int(os.environ.get("TASKS", "1000"))
AHEAD = float(os.environ.get("AHEAD", "15"))

FOLDER = os.environ.get("LIBRARY_EXAMPLE", "")

app = Celery("shop", broker=f"toc+embedded://{FOLDER}/server?toc_library=on")
app.conf.worker_hijack_root_logger = False


@app.task(name="shop.expire")
def expire(order: int, due: float) -> None:
    with open(Path(FOLDER) / "run.txt", "a") as log:
        log.write(f"{order} {time.time() - due}\n")


def main() -> None:
    due = time.time() + AHEAD
    for order in range(TASKS):
        when = due + order * 0.002
        expire.apply_async((order, when), eta=_utc(when), headers=celery_toc.biz("order", order))
    center = celery_toc.timeout_center(app)
    center.client.flushall()
    left = sum(center.counts(name).waiting for name in center.queues.names())
    print(f"sent {TASKS} tasks, flushed Redis: it holds {left} messages", flush=True)
    done = center.library.rebuild()
    print(f"put {done.put} messages back", flush=True)

    worker = subprocess.Popen(
        [sys.executable, __file__, "worker"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    log = Path(FOLDER) / "run.txt"
    deadline = due + TASKS * 0.002 + 60
    lines: list[str] = []
    while len(lines) < TASKS and time.time() < deadline:
        time.sleep(0.2)
        lines = log.read_text().splitlines() if log.exists() else []
    worker.terminate()
    worker.wait()
    lines = log.read_text().splitlines()
    runs = Counter(line.split()[0] for line in lines)
    late = [float(line.split()[1]) for line in lines]
    twice = sum(number > 1 for number in runs.values())
    print(
        f"run: {len(runs)} of {TASKS}, twice: {twice}, early: {sum(one < 0 for one in late)}, "
        f"late by {max(late):.3f} s at most"
    )


def _utc(moment: float):
    from datetime import datetime, timezone

    return datetime.fromtimestamp(moment, timezone.utc)


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        app.worker_main(["worker", "--pool=threads", "--concurrency=4", "--loglevel=error"])
    else:
        # The server ends by itself, and may write there until then.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            again = {**os.environ, "LIBRARY_EXAMPLE": folder}
            if FOLDER:
                main()
            else:
                sys.exit(subprocess.call([sys.executable, __file__], env=again))
