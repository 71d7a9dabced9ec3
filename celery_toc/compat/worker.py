"""How a worker starts, connects, counts its tasks and ends.

A worker's consumer gets one more bootstep (`bootstep`).

Touches: `Consumer.Blueprint.default_steps`, to which the step is added.

Why: ``app.steps["consumer"]`` is the public way, for who has the app. The transport is asked for by
a worker of any app, with gevent and eventlet after Celery has told of it (``worker_init``).

Read in Celery 5.3.6 and 5.7.0.

Without: a worker would know nothing of leases, and give back what its processes execute when its
connection breaks. Nothing starts.

Which tasks a worker has, and whether it is told to end (`worker-state`).

Touches: ``celery.worker.state``: ``requests``, ``reserved_requests``, ``active_requests``,
``should_stop``, ``should_terminate`` and ``maybe_shutdown``.

Why: no signal and no method tells which tasks a worker has; the commands that show them are for
others, and copy what they show.

Read in Celery 5.3.6 and 5.7.0.

Without: a message would be given back while its task is executed. A worker does not start.

The references in a WeakSet, without going through what they refer to (`weak-sets`).

Touches: ``weakref.WeakSet.data`` of ``celery.worker.state.reserved_requests`` and
``active_requests``.

Why: how many tasks are in hand is asked several times in each turn of the event loop. To go
through a WeakSet costs more than all else that is asked; its length counts what both sets hold
twice.

Read in Python 3.10 to 3.13.

Without: a worker takes longer for each turn of its event loop.

A worker pauses between connections that do not last (`connect-pause`).

Touches: `Consumer.connect`, which is replaced on the consumer.

Why: Celery connects again at once, five times a second. Its settings have a limit of attempts,
but no pause after a connection that was made and broke. A server that lets a worker in and then
refuses what it needs would be asked, and the log be filled, without an end.

Read in Celery 5.3.6 and 5.7.0.

Without: a worker whose connections break as soon as they are made tries five times a second.

A cold shutdown gives back what nobody has begun before it waits (`soft-shutdown`).

Touches: ``WorkController.wait_for_soft_shutdown`` of Celery 5.5 and later, which is replaced on the
worker.

Why: a cold shutdown happens within a signal handler, in which Celery sleeps for as long as tasks
may still end, and waits for the pool. The signal ``worker_shutting_down`` comes before that, and
tells nothing of who else may be stopped by then.

Read in Celery 5.5.3, 5.6.3 and 5.7.0; 5.3 and 5.4 have no soft shutdown.

Without: what a worker has fetched and not begun comes back when its leases end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from kombu_toc import CompatPart

# -- bootstep

BOOTSTEP = CompatPart(
    "bootstep",
    touches="Celery's Consumer.Blueprint.default_steps",
    lost="a worker would give back tasks that it executes",
    check=lambda blueprint: [
        *CompatPart.missing(blueprint, "default_steps"),
        *CompatPart.missing(getattr(blueprint, "default_steps", []), "append", "__contains__"),
    ],
    way_out="Install Celery 5.3.6 to 5.7",
)


def add_bootstep(step: type) -> None:
    """Give it to every worker's consumer that is made from now on. Raises CompatError."""
    from celery.worker.consumer import Consumer

    blueprint: Any = Consumer.Blueprint
    BOOTSTEP.usable(blueprint)
    if step not in blueprint.default_steps:
        blueprint.default_steps.append(step)


# -- worker-state

_NAMES = (
    "requests",
    "reserved_requests",
    "active_requests",
    "should_stop",
    "should_terminate",
    "maybe_shutdown",
)

WORKER_STATE = CompatPart(
    "worker-state",
    touches=f"celery.worker.state: {', '.join(_NAMES)}",
    lost="messages would be given back while their tasks are executed",
    check=lambda state: CompatPart.missing(state, *_NAMES),
    way_out="Install Celery 5.3.6 to 5.7",
)


def check_worker_state() -> None:
    """Raises CompatError."""
    from celery.worker import state

    WORKER_STATE.usable(state)


# -- weak-sets

WEAK_SETS = CompatPart(
    "weak-sets",
    touches="Python's WeakSet.data",
    lost="a worker takes longer for each turn of its event loop",
    check=lambda some: [] if isinstance(getattr(some, "data", None), set) else ["WeakSet.data"],
)


def references(first: Any, second: Any) -> Callable[[], set[Any]]:
    """Return a function that gives references to everything that two WeakSets hold."""
    if WEAK_SETS.usable(first) and WEAK_SETS.usable(second):
        return lambda: first.data | second.data

    def through() -> set[Any]:
        return set(map(ref, [*_listed(first), *_listed(second)]))

    return through


def _listed(some: Iterable[Any]) -> list[Any]:
    while True:
        try:
            return list(some)
        except RuntimeError:  # another thread has added one, or taken one out
            continue


# -- connect-pause

CONNECT_PAUSE = CompatPart(
    "connect-pause",
    touches="Celery's Consumer.connect",
    lost="a worker whose connections break at once connects five times a second",
    check=lambda consumer: CompatPart.missing(consumer, "connect"),
)

#: Seconds: what lasted shorter was no connection that a worker could use; how long it pauses after
#: the first of those, and how long at most, after several in a row.
SHORT = 3.0
FIRST_PAUSE = 0.1
LAST_PAUSE = 5.0


def install_connect_pause(consumer: Any, maybe_shutdown: Callable[[], None]) -> None:
    """Have a worker's consumer pause; `maybe_shutdown` raises what ends a worker that is told
    to end meanwhile."""
    if not CONNECT_PAUSE.usable(consumer):
        return
    connect = consumer.connect
    connected, pause = -math.inf, 0.0

    def connect_after_a_pause() -> Any:
        nonlocal connected, pause
        now = time.monotonic()
        short = now - connected < SHORT
        pause = min(max(2 * pause, FIRST_PAUSE), LAST_PAUSE) if short else 0.0
        while (left := now + pause - time.monotonic()) > 0:
            maybe_shutdown()
            time.sleep(min(left, 0.1))
        made = connect()
        connected = time.monotonic()
        return made

    consumer.connect = connect_after_a_pause


# -- soft-shutdown

SOFT_SHUTDOWN = CompatPart(
    "soft-shutdown",
    touches="Celery's WorkController.wait_for_soft_shutdown",
    lost="what a worker has fetched comes back from a cold shutdown when its leases end",
    check=lambda worker: [],  # Celery before 5.5 has none, and needs none
)


def install_soft_shutdown(worker: Any, before: Callable[[], None]) -> None:
    """Have a worker call `before` when its soft shutdown begins."""
    wait = getattr(worker, "wait_for_soft_shutdown", None)
    if wait is None or hasattr(wait, "is_ours") or not SOFT_SHUTDOWN.usable(worker):
        return

    def wait_for_soft_shutdown() -> None:
        before()
        wait()

    ours: Any = wait_for_soft_shutdown
    ours.is_ours = True
    worker.wait_for_soft_shutdown = ours
