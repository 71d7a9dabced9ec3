"""Countdown tasks on an embedded server and a real worker, and how late each of them started.

Run it with ``./first-run``, or in an environment of your own, which needs celery-toc[embedded]:
``python examples/first_run``. It ends with status 1 if a task was early or missing or ran twice.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import celery
from report import histogram, table

from kombu_toc import EmbeddedServer

HERE = Path(__file__).parent

#: Seconds that the worker may take to come up.
START_TIMEOUT = 60

#: Seconds that results may still take after the last action time.
GRACE = 30

#: Seconds that the worker or the server may take to stop. A pool process of Celery's that is
#: stopped at a bad moment waits for 30.
STOP_TIMEOUT = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="first-run", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=300, help="how many (300)")
    parser.add_argument(
        "--first", type=float, help="shortest countdown, seconds (2; with --page 15)"
    )
    parser.add_argument(
        "--last", type=float, help="longest countdown, seconds (12; with --page 300)"
    )
    parser.add_argument("--concurrency", type=int, default=4, help="worker processes (4)")
    parser.add_argument("--page", action="store_true", help="show them in a browser, until Ctrl-C")
    parser.add_argument("--port", type=int, default=8088, help="of the page (8088)")
    chosen = parser.parse_args()
    first, last = (15, 300) if chosen.page else (2, 12)
    chosen.first = first if chosen.first is None else chosen.first
    chosen.last = max(last, chosen.first) if chosen.last is None else chosen.last
    if chosen.tasks < 1 or chosen.concurrency < 1 or not 0 <= chosen.first <= chosen.last:
        parser.error("there must be a task, a process, and a countdown from 0 up")
    return chosen


@contextmanager
def embedded_server() -> Iterator[str]:
    """The folder of a server that lasts as long as the block."""
    directory = tempfile.mkdtemp(prefix="celery-toc-")
    server = EmbeddedServer.join(directory)
    try:
        yield directory
    finally:
        server.leave()  # the last one who leaves stops it
        deadline = time.monotonic() + STOP_TIMEOUT
        while server.answers() and time.monotonic() < deadline:
            time.sleep(0.05)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def worker(directory: str, concurrency: int) -> Iterator[subprocess.Popen[bytes]]:
    """A Celery worker that lasts as long as the block."""
    command = [sys.executable, "-m", "celery", "--app", "tasks", "--workdir", str(HERE)]
    command += ["worker", "--concurrency", str(concurrency), "--loglevel", "WARNING"]
    with open(Path(directory, "worker.log"), "wb") as log:
        # In a session of its own, so that Ctrl-C reaches it once: from here.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def page(directory: str, port: int) -> Iterator[str]:
    """The address of the page, which lasts as long as the block."""
    command = [sys.executable, "-m", "celery", "--app", "tasks", "--workdir", str(HERE)]
    command += ["toc", "web", "--port", str(port)]
    with open(Path(directory, "page.log"), "w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if "Listening at " in line:
                yield f"{line.split('Listening at ')[1].strip()}/page/"
                return
        raise SystemExit(
            f"The page cannot be served. {''.join(said[-3:])}--port NUMBER chooses another port."
        )
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


class Progress:
    """One line that changes on a terminal; a new line every two seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next = 0.0

    def show(self, line: str) -> None:
        if self._terminal:
            print(f"\r  {line:<70}", end="", flush=True)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + 2
            print(f"  {line}", flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r" + " " * 72 + "\r", end="", flush=True)


def wait_for_worker(app: celery.Celery, process: subprocess.Popen[bytes]) -> str | None:
    """The worker's name, once it answers; None if it never does."""
    deadline = time.monotonic() + START_TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        for reply in app.control.ping(timeout=0.5, limit=1) or ():
            return next(iter(reply))
    return None


def run(options: argparse.Namespace, directory: str) -> bool:
    """Send the tasks, wait for them, and print how late they were; whether all was well."""
    os.environ["FIRST_RUN_DIRECTORY"] = directory
    from tasks import app, note_lateness

    from celery_toc import timeout_center

    center = timeout_center(app)
    version = center.client.info("server")
    kind = "Valkey" if "valkey_version" in version else "Redis"
    number = version.get("valkey_version") or version["redis_version"]
    print(f"Embedded server: {kind} {number} at {app.conf.broker_url}", flush=True)

    with worker(directory, options.concurrency) as process:
        name = wait_for_worker(app, process)
        if name is None:
            print("The worker does not start. Its log:")
            print(Path(directory, "worker.log").read_text(errors="replace"))
            return False
        print(f"Worker: Celery {celery.__version__}, {options.concurrency} processes", flush=True)

        dice = random.Random(1)
        latenesses: list[float] = []
        pending: set[celery.result.AsyncResult] = set()
        progress = Progress()
        try:
            for _ in range(options.tasks):
                countdown = dice.uniform(options.first, options.last)
                pending.add(note_lateness.apply_async(countdown=countdown))
            last = time.monotonic() + options.last
            print(
                f"Sent {options.tasks} tasks with countdowns of {options.first:g} to "
                f"{options.last:g} seconds. They wait in Redis.",
                flush=True,
            )
            if options.page:
                show_page(directory, options.port)
                return True
            while pending and time.monotonic() < last + GRACE and process.poll() is None:
                for result in [result for result in pending if result.ready()]:
                    pending.remove(result)
                    if result.successful():
                        latenesses.append(result.result)
                counts = center.counts("celery")
                progress.show(
                    f"waiting in Redis {counts.scheduled:>4}   due {counts.ready:>3}   "
                    f"in the worker {counts.in_flight:>3}   done {len(latenesses):>4}"
                )
                time.sleep(0.25)
        finally:
            pending.clear()  # a result that is given up tells the server, so while there is one
        progress.end()
        stats = app.control.inspect(destination=[name], timeout=10).stats() or {name: {}}
        started = stats[name].get("total", {}).get(note_lateness.name, 0)
        log = Path(directory, "worker.log").read_text(errors="replace")

    print()
    print(table(latenesses, options.tasks, started))
    print()
    print(histogram(latenesses))
    print()
    early = sum(1 for lateness in latenesses if lateness < 0)
    if not early and len(latenesses) == started == options.tasks:
        print("Every task ran once, and none before its ETA.")
        print("See them count down in a browser: ./first-run --page")
        return True
    print("NOT as it should be: a task was early, or missing, or ran twice. The worker's log:")
    print(log)
    return False


def show_page(directory: str, port: int) -> None:
    """Show what waits in a browser, until Ctrl-C."""
    with page(directory, port) as address:
        print(f"\n  Open {address} and see them count down. Ctrl-C ends it.\n", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            print("\nStopped.", flush=True)


def main() -> int:
    options = arguments()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        with embedded_server() as directory:
            return 0 if run(options, directory) else 1
    except KeyboardInterrupt:
        print("\nStopped.", flush=True)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
