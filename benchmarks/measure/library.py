"""library: what a record of each task in SQL costs, on each database of this machine; how fast
Redis is filled from it, and what a search in it costs as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..databases import database, missing, timed_database
from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

ENGINES = ("sqlite", "postgresql", "mariadb")
_TITLES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mariadb": "MariaDB"}
_PREFORK = ("-P", "prefork", "-c", "2")


def _for_each(name: str, title: str, unit: str) -> dict[str, Metric]:
    return {
        f"{name}_{engine}": Metric(f"{title}, {_TITLES[engine]}", unit, more_is_better=True)
        for engine in ENGINES
    }


METRICS = {
    "publish_none": Metric("published one by one, no library", "tasks/s", more_is_better=True),
    **_for_each("publish", "published one by one", "tasks/s"),
    **_for_each("batch", "published in batches of 100", "tasks/s"),
    **_for_each("put_many", "put in lists of 10,000", "messages/s"),
    "drain_none": Metric("drained, no library", "tasks/s", more_is_better=True),
    **_for_each("drain", "drained", "tasks/s"),
    **_for_each("drain_ratio", "drained, against without", ""),
    **_for_each("rebuild", "rebuilt", "tasks/s"),
    "behind_publish": Metric("published, rows behind", "tasks/s", more_is_better=True),
    "behind_publish_ratio": Metric("published, rows behind, against none", "", more_is_better=True),
    "behind_drain": Metric("drained, rows behind", "tasks/s", more_is_better=True),
    "behind_drain_ratio": Metric("drained, rows behind, against none", "", more_is_better=True),
    "none_worker": Metric("processor time of a drained task: worker, rows none", "us"),
    "none_redis": Metric("processor time of a drained task: Redis, rows none", "us"),
    "behind_worker": Metric("processor time of a drained task: worker, rows behind", "us"),
    "behind_redis": Metric("processor time of a drained task: Redis, rows behind", "us"),
    "behind_database": Metric("processor time of a drained task: database, rows behind", "us"),
    "behind_time_ratio": Metric(
        "processor time, none : behind, but for the database's", "", more_is_better=True
    ),
    "rows": Metric("rows at last", ""),
    "find_small": Metric("search by business id, few rows, p50", "ms"),
    "find_large": Metric("search by business id, all rows, p50", "ms"),
    "insert_small": Metric("one row more, few rows", "ms"),
    "insert_large": Metric("one row more, all rows", "ms"),
    "ended_small": Metric("an end of 300, few rows", "us"),
    "ended_large": Metric("an end of 300, all rows", "us"),
    "bytes": Metric("in PostgreSQL, for each row", "bytes"),
    "fill_seconds": Metric("rows made in", "s"),
    "bytes_per_row": Metric("in PostgreSQL, for each far row", "bytes"),
    "near": Metric("tasks within the horizon", ""),
    "memory_near": Metric("Redis with these", "MB"),
    "load": Metric("loaded ahead", "tasks/s", more_is_better=True),
    "find_p50": Metric("search by business id, of the database, p50", "ms"),
    "find_max": Metric("search by business id, of the database, at most", "ms"),
    "by_id": Metric("get of a far task by id, p50", "ms"),
    "late_direct_p50": Metric("lateness of what was put directly, p50", "ms"),
    "late_direct_p99": Metric("lateness of what was put directly, p99", "ms"),
    "late_far_p50": Metric("lateness of what was far ahead, p50", "ms"),
    "late_far_p99": Metric("lateness of what was far ahead, p99", "ms"),
    "late_ratio": Metric("of far against direct, p50", ""),
}

CASES = {
    "library-publish": ({"publish": 5000}, {"publish": 1000}),
    "library-put_many": ({"messages": 50_000}, {"messages": 10_000}),
    "library-drain": ({"drain": 20_000}, {"drain": 3000}),
    "library-rebuild": ({"rebuild": 200_000}, {"rebuild": 20_000}),
    "library-behind": ({"behind": 20_000}, {"behind": 3000}),
    "library-far": ({"far": 10_000_000}, {"far": 200_000}),
    "library-growth": (
        {"growth": (10_000, 100_000, 1_000_000, 10_000_000)},
        {"growth": (10_000, 100_000)},
    ),
}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_product


def notes() -> list[str]:
    return missing()


def measure(peer: Peer, **arguments: Any) -> dict[str, Any]:
    [(what, size)] = arguments.items()
    return {
        "publish": publish,
        "messages": put_many,
        "drain": drain,
        "rebuild": rebuild,
        "growth": growth,
        "behind": behind,
        "far": far,
    }[what](peer, size)


def _inside(
    trial: Trial, what: str, library: str, *numbers: int, script: str = "library.py"
) -> dict[str, Any]:
    return trial.run_inside(script, what, trial.broker.url, library, *numbers, timeout=3600)


def _trial(peer: Peer, url: str | None, mode: str = "through") -> Trial:
    options: dict[str, Any] = {"toc_library": url} if url else {}
    if mode != "through":
        options["toc_topics"] = {"celery": {"library": mode}}
    return Trial(peer, {"broker_transport_options": options})


def publish(peer: Peer, tasks: int) -> dict[str, Any]:
    """Immediate tasks a second, one by one and in batches."""
    found: dict[str, Any] = {}
    with _trial(peer, None) as trial:
        trial.tell("prepare")
        trial.tell("publish", tasks=200)
        found["publish_none"] = tasks / trial.tell("publish", tasks=tasks)
    for engine in ENGINES:
        with database(engine) as url:
            if url is None:
                continue
            with _trial(peer, url) as trial:
                _inside(trial, "create", url)
                trial.tell("prepare")
                trial.tell("publish", tasks=200)
                found[f"publish_{engine}"] = tasks / trial.tell("publish", tasks=tasks)
                took = trial.tell("publish", tasks=tasks, batch=100)
                found[f"batch_{engine}"] = None if took is None else tasks / took
    return found


def put_many(peer: Peer, messages: int) -> dict[str, Any]:
    return _of_each(peer, "put_many", messages)


def rebuild(peer: Peer, rows: int) -> dict[str, Any]:
    return _of_each(peer, "rebuild", rows)


def _of_each(peer: Peer, what: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engine in ENGINES:
        with database(engine) as url, Trial(peer) as trial:
            if url is not None:
                _inside(trial, "create", url)
                done = _inside(trial, what, url, number)
                found[f"{what}_{engine}"] = done.get(what)
    return found


def drain(peer: Peer, tasks: int) -> dict[str, Any]:
    """Starts a second, as `drain` has them, with what becomes of each task recorded."""
    found: dict[str, Any] = {"drain_none": _drained(peer, tasks, None)}
    for engine in ENGINES:
        with database(engine) as url:
            if url is not None:
                rate = found[f"drain_{engine}"] = _drained(peer, tasks, url)
                found[f"drain_ratio_{engine}"] = rate / found["drain_none"]
    return found


def _drained(peer: Peer, tasks: int, url: str | None, mode: str = "through") -> float:
    return _drained_and_timed(peer, tasks, url, mode)[0]


def _drained_and_timed(
    peer: Peer,
    tasks: int,
    url: str | None,
    mode: str,
    of_database: Callable[[], float] = lambda: 0.0,
) -> tuple[float, dict[str, float]]:
    """Starts a second, and microseconds of processor time for a task, until everything is
    written: of the worker, Redis and the database."""
    with _trial(peer, url, mode) as trial:
        if url is not None:
            _inside(trial, "create", url)
        trial.tell("prepare")
        trial.tell("publish", tasks=tasks)
        trial.start(*_PREFORK)

        def used() -> dict[str, float]:
            assert trial.broker.server is not None
            worker = sum(sum(process.cpu_times()[:2]) for process in trial.processes())
            return {
                "worker": worker,
                "redis": trial.broker.server.cpu(),
                "database": of_database(),
            }

        trial.wait(tasks // 10, 60.0)
        began, first = used(), trial.count()
        trial.wait(tasks, 60 + tasks / 100)
        times = [at for _, at, _ in trial.starts()][tasks // 10 :]
        if mode == "behind":
            _inside(trial, "settle", url, tasks)
        ended = used()
        each = {name: 1e6 * (ended[name] - began[name]) / (tasks - first) for name in ended}
        return (len(times) - 1) / (times[-1] - times[0]), each


def behind(peer: Peer, tasks: int) -> dict[str, Any]:
    """Publishes, and a drained backlog, of a queue whose rows are written behind, against none.

    On a machine that has few processors the database's time counts as slowness as well; so the
    processor time of each part is told, and the ratio of that without the database's.
    """
    found: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"publish": [], "drain": []}
    with _recording() as (url, of_database):
        for mode, library in (("off", None), ("behind", url)):
            with _trial(peer, library, mode) as trial:
                if library is not None:
                    _inside(trial, "create", library)
                trial.tell("prepare")
                trial.tell("publish", tasks=200)
                rates["publish"].append(tasks / trial.tell("publish", tasks=tasks))
        own: dict[str, float] = {}
        for mode, library in (("off", None), ("behind", url)):
            rate, each = _drained_and_timed(peer, tasks, library, mode, of_database)
            rates["drain"].append(rate)
            name = "none" if mode == "off" else mode
            found |= {f"{name}_{part}": each[part] for part in ("worker", "redis")}
            own[name] = each["worker"] + each["redis"]
        found["behind_database"] = each["database"]
        found["behind_time_ratio"] = own["none"] / own["behind"]
    for name, (without, behind) in rates.items():
        found[f"behind_{name}"] = behind
        found[f"behind_{name}_ratio"] = behind / without
    return found


def far(peer: Peer, rows: int) -> dict[str, Any]:
    """What is far ahead, in PostgreSQL: see the script."""
    found: dict[str, Any] = {}
    with database("postgresql") as url, Trial(peer) as trial:
        if url is not None:
            for what in ("fill", "measure"):
                found.update(_inside(trial, what, url, rows, script="far_store.py"))
            found["late_ratio"] = found["late_far_p50"] / found["late_direct_p50"]
    return found


@contextmanager
def _recording() -> Iterator[tuple[str, Callable[[], float]]]:
    """A database that is there: PostgreSQL, or SQLite; and what gives the processor time that its
    server has used."""
    for engine in ("postgresql", "sqlite"):
        with timed_database(engine) as (url, used):
            if url is not None:
                yield url, used
                return


def growth(peer: Peer, sizes: tuple[int, ...]) -> dict[str, Any]:
    """On PostgreSQL; on SQLite if there is none."""
    with _recording() as (url, _), Trial(peer) as trial:
        _inside(trial, "create", url)
        return _inside(trial, "growth", url, *sizes)
