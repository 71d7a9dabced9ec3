"""recurring: tasks that run every second, without a beat process; and beside them Celery's own beat
and redbeat, on the same broker.

Each interval begins with a whole second (``relative``), so what the clock shows beyond it is how
late a task starts. A beat sends up to ten milliseconds early: such a start counts as 0.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

from ..metrics import Metric, percentile
from ..peers import Peer
from ..trial import Trial, kill

METRICS = {
    "p50": Metric("from the second to the start (p50)", "ms"),
    "p99": Metric("the same (p99)", "ms"),
    "beat_p50": Metric("celery beat on the same broker (p50)", "ms"),
    "beat_p99": Metric("the same (p99)", "ms"),
    "redbeat_p50": Metric("redbeat on the same broker (p50)", "ms"),
    "redbeat_p99": Metric("the same (p99)", "ms"),
    "second_p50": Metric("lateness of 1,000 firings due within a second, threads (p50)", "ms"),
    "second_p99": Metric("the same (p99)", "ms"),
    "missed": Metric("of the firings while workers are killed: missed", ""),
    "twice": Metric("the same: sent twice", ""),
    "put": Metric("schedules put by one process", "1/s", more_is_better=True),
    "bytes": Metric("in Redis per schedule that waits", "bytes"),
    "commands": Metric("an idle worker's commands, with 100 schedules", "1/s"),
    "commands_with": Metric("the same, with so many more that wait", "1/s"),
}
CASES = {
    "recurring": (
        {"schedules": 50, "seconds": 20, "killed": 20, "waiting": 100_000},
        {"schedules": 20, "seconds": 6, "killed": 4, "waiting": 100_000},
    )
}
ROUNDS = (1, 1)

#: Seconds for which an idle worker's commands are counted.
_IDLE = 10.0

#: Schedules that are put one by one.
_PUT = 100

#: Firings that are due within a second, seconds until they are again, and how often that is.
_FIRINGS, _ROUND, _ROUNDS = 1000, 8.0, 4

#: As in `inside.app`.
_SCHEDULE = 10**14

#: A start that is so much before a second belongs to it.
_EARLY = 0.1


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_product or peer.name == "redis"


def measure(
    peer: Peer, schedules: int, seconds: int, killed: int, waiting: int
) -> dict[str, float | None]:
    """Milliseconds, and numbers.

    seconds: for which each way is looked at
    killed: how many workers are killed while firings are counted
    waiting: schedules of an idle worker
    """
    found: dict[str, float | None] = dict.fromkeys(METRICS)
    for way in ("beat", "redbeat"):
        late = _lateness(peer, schedules, seconds, way)
        found[f"{way}_p50"], found[f"{way}_p99"] = late
    if not peer.is_product:
        found["p50"], found["p99"] = found["beat_p50"], found["beat_p99"]
        return found
    found["p50"], found["p99"] = _lateness(peer, schedules, seconds, "")
    found["second_p50"], found["second_p99"] = _within_a_second(peer)
    found["missed"], found["twice"] = _under_kills(peer, killed)
    return {**found, **_waiting(peer, waiting)}


def _lateness(peer: Peer, schedules: int, seconds: int, beat: str) -> tuple[float, float]:
    """How late tasks start: the median and the 99th percentile, milliseconds."""
    entries = {
        f"tick-{number}": {
            "task": "app.tick",
            "schedule": 1.0,
            "args": [number],
            "relative": True,
        }
        for number in range(schedules)
    }
    settings = {"beat_schedule": entries, "toc_beat": not beat}
    with Trial(replace(peer, settings={**peer.settings, **settings})) as trial:
        trial.work(1, "-c", "2")
        if beat:
            trial.beat("redbeat.RedBeatScheduler" if beat == "redbeat" else None)
        # The first seconds are those of its start.
        trial.wait(trial.count() + 3 * schedules)
        trial.wait(trial.count() + seconds * schedules, 60.0 + 3 * seconds)
        starts = [at for _, at, _ in trial.starts()]
    late = [((at + _EARLY) % 1.0) - _EARLY for at in starts[3 * schedules :]]
    times = [max(one, 0.0) * 1000 for one in late]
    return percentile(times, 50), percentile(times, 99)


def _within_a_second(peer: Peer) -> tuple[float, float]:
    """How late firings start that are due within one second: the median and the 99th percentile of
    all rounds but the first, milliseconds."""
    with Trial(peer) as trial:
        trial.work(2, "-P", "threads", "-c", "4")
        before = trial.count()
        trial.tell("recur", every=_ROUND, number=_FIRINGS, within=1.0, delay=5)
        trial.wait(before + _ROUNDS * _FIRINGS, 60.0 + _ROUNDS * _ROUND)
        starts = sorted(trial.starts(), key=lambda start: start[0] % _SCHEDULE)
    late = [1000 * at - planned % _SCHEDULE for planned, at, _ in starts[_FIRINGS:]]
    return percentile(late, 50), percentile(late, 99)


def _under_kills(peer: Peer, killed: int) -> tuple[int, int]:
    """Firings that were missed, and those that were sent twice, while workers are killed."""
    every, number = 0.05, 10
    settings = {"broker_transport_options": {"visibility_timeout": 1, "socket_timeout": 5}}
    with Trial(replace(peer, settings={**peer.settings, **settings})) as trial:
        for _ in range(3):
            trial.start("-P", "solo", "--without-mingle")
        trial.wait_ready(3)
        trial.tell("recur", every=every, number=number)
        for _ in range(killed):
            time.sleep(0.7)  # it works for so long
            kill(trial.workers.pop(0))
            trial.start("-P", "solo", "--without-mingle")
        trial.wait(trial.count() + 200, 120.0)
        left = trial.tell("stop_recurring")
        time.sleep(5.0)  # what is in flight comes back and runs
        starts = Counter(one for one, _, _ in trial.starts())
    planned = {
        one: [schedule * _SCHEDULE + at for at in range(first, last + 1, round(every * 1000))]
        for one, (schedule, first, last) in left.items()
    }
    every_one = [one for some in planned.values() for one in some]
    missed = sum(1 for one in every_one if not starts[one])
    return missed, sum(1 for one in every_one if starts[one] > 1)


def _waiting(peer: Peer, number: int) -> dict[str, float]:
    """What schedules cost that wait for tomorrow."""
    with Trial(peer) as trial:
        client = trial.broker.server.client()
        trial.work(1, "-c", "2")
        took = trial.tell("put_schedules", number=_PUT)
        time.sleep(6.0)  # what it does after its start is over, and its counts are sent
        few = _commands(client)
        before = client.info("memory")["used_memory"]
        trial.tell("copy_schedules", number=number)
        after = client.info("memory")["used_memory"]
        time.sleep(6.0)  # the counts of this are sent
        return {
            "put": _PUT / took,
            "bytes": (after - before) / number,
            "commands": few,
            "commands_with": _commands(client),
        }


def _commands(client: Any) -> float:
    before, began = client.info("stats")["total_commands_processed"], time.monotonic()
    time.sleep(_IDLE)
    done = client.info("stats")["total_commands_processed"] - before
    return done / (time.monotonic() - began)
