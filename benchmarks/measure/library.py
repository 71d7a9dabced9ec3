"""library: what a record of each task in SQL costs, on each database of this machine; how fast
Redis is filled from it, and what a search in it costs as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import truediv
from statistics import median
from typing import Any

from ..databases import database, missing, timed_database
from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

ENGINES = ("sqlite", "postgresql", "mariadb")
_TITLES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mariadb": "MariaDB"}
_PREFORK = ("-P", "prefork", "-c", "2")

#: Drains with rows behind, each beside one without: an even number.
_PAIRS = 4


def _for_each(name: str, title: str, unit: str) -> dict[str, Metric]:
    return {
        f"{name}_{engine}": Metric(f"{title}, {_TITLES[engine]}", unit, more_is_better=True)
        for engine in ENGINES
    }


#: What is measured of a library of each size: title, unit, whether more is better.
_GROWING = {
    "put": ("one message more, through", "ms", False),
    "put_many": ("each of 1,000 messages more, through", "ms", False),
    "taken": ("each of 500 that are taken", "ms", False),
    "done": ("each of 500 that are done", "ms", False),
    "find_biz": ("find by business id", "ms", False),
    "find_ended": ("find by business id, ended", "ms", False),
    "find_time": ("find 100 pending, by time", "ms", False),
    "find_soon": ("find the soonest 100", "ms", False),
    "find_dead": ("find 100 that are dead", "ms", False),
    "find_past": ("find 100 that are done, by time", "ms", False),
    "history": ("history of an id, pending", "ms", False),
    "history_ended": ("history of an id, ended", "ms", False),
    "cancel": ("cancel by business id", "ms", False),
    "rebuild_first": ("rebuild, until the first are back", "ms", False),
    "rebuild": ("rebuild, the first 20,000", "tasks/s", True),
    "load": ("loaded ahead, the first 20,000", "tasks/s", True),
    "look": ("a look at 2,000 that are overdue", "ms", False),
    "counts": ("count all rows by status", "ms", False),
    "prune": ("drop some days of history", "ms", False),
    "fill": ("rows made in", "s", False),
    "bytes": ("in the database, for each row", "bytes", False),
    "purge": ("purge of a queue of 100 rows, each row", "ms", False),
}


def _label(rows: int) -> str:
    """10k, 1M."""
    return f"{rows // 1_000_000}M" if rows >= 1_000_000 else f"{rows // 1000}k"


SIZES = (10_000, 100_000, 1_000_000, 10_000_000)

#: Of MariaDB, with the buffer pool of 128 MB that it has by default: more rows are not tried.
MARIADB_SIZES = SIZES[:3]

METRICS = {
    "publish_none": Metric("published one by one, no library", "tasks/s", more_is_better=True),
    **_for_each("publish", "published one by one", "tasks/s"),
    **_for_each("batch", "published in batches of 100", "tasks/s"),
    **_for_each("put_many", "put in lists of 10,000", "messages/s"),
    "drain_none": Metric("drained, no library", "tasks/s", more_is_better=True),
    **_for_each("drain", "drained", "tasks/s"),
    **_for_each("drain_ratio", "drained, against without", ""),
    **_for_each("rebuild", "rebuilt", "tasks/s"),
    "none_publish": Metric(
        "published in turns with those, rows none", "tasks/s", more_is_better=True
    ),
    "behind_publish": Metric("published, rows behind", "tasks/s", more_is_better=True),
    "behind_publish_ratio": Metric("published, rows behind, against none", "", more_is_better=True),
    **{
        f"{mode}_publish_{part}": Metric(
            f"processor time of a published task: {title}, rows {mode}", "us"
        )
        for mode in ("none", "behind")
        for part, title in (("sender", "sender"), ("redis", "Redis"))
    },
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
    **{
        f"{name}@{_label(size)}": Metric(f"{title}, {_label(size)} rows", unit, more)
        for name, (title, unit, more) in _GROWING.items()
        for size in SIZES
    },
    **{
        f"{name}_mariadb@{_label(size)}": Metric(
            f"{title}, MariaDB, {_label(size)} rows", unit, more
        )
        for name, (title, unit, more) in _GROWING.items()
        for size in MARIADB_SIZES
    },
}

CASES = {
    "library-publish": ({"publish": 5000}, {"publish": 1000}),
    "library-put_many": ({"messages": 50_000}, {"messages": 10_000}),
    "library-drain": ({"drain": 20_000}, {"drain": 3000}),
    "library-rebuild": ({"rebuild": 200_000}, {"rebuild": 20_000}),
    "library-behind": ({"behind": 10_000}, {"behind": 4000}),
    "library-far": ({"far": 10_000_000}, {"far": 200_000}),
    "library-growth": ({"growth": SIZES}, {"growth": SIZES[:2]}),
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
    warm_up: int = 10,
) -> tuple[float, dict[str, float]]:
    """Starts a second, and microseconds of processor time for a task, until everything is
    written: of the worker, Redis and the database.

    warm_up: which part of the tasks is warm-up: one in so many
    """
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

        trial.wait(tasks // warm_up, 60.0)
        began, first = used(), trial.count()
        trial.wait(tasks, 60 + tasks / 100)
        times = [at for _, at, _ in trial.starts()][tasks // warm_up :]
        if mode == "behind":
            _inside(trial, "settle", url, tasks)
        ended = used()
        each = {name: 1e6 * (ended[name] - began[name]) / (tasks - first) for name in ended}
        return (len(times) - 1) / (times[-1] - times[0]), each


def behind(peer: Peer, tasks: int) -> dict[str, Any]:
    """Publishes, and a drained backlog, of a queue whose rows are written behind, against none.

    Publishes are sent in turns by one process, and no worker runs: a sender writes no rows. Drains
    are run in pairs, for the machine is not as fast at any time; each number is their median.

    On a machine that has few processors the database's time counts as slowness as well; so the
    processor time of each part is told, and the ratio of that without the database's.
    """
    found: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"off": [], "behind": []}
    times: dict[str, list[dict[str, float]]] = {"off": [], "behind": []}
    with _recording() as (url, _), Trial(peer) as trial:
        _inside(trial, "create", url)
        found |= _inside(trial, "publish", url, tasks, script="behind_publish.py")
    for mode in ("off", "behind", "behind", "off") * (_PAIRS // 2):
        with _recording() as (url, of_database):
            library = None if mode == "off" else url
            # In the first quarter the worker opens its database, once.
            rate, each = _drained_and_timed(peer, tasks, library, mode, of_database, 4)
            rates[mode].append(rate)
            each["own"] = each["worker"] + each["redis"]
            times[mode].append(each)
    for mode, name in (("off", "none"), ("behind", "behind")):
        for part in ("worker", "redis"):
            found[f"{name}_{part}"] = median(one[part] for one in times[mode])
    found["behind_database"] = median(one["database"] for one in times["behind"])
    own = [[one["own"] for one in times[mode]] for mode in ("off", "behind")]
    found["behind_time_ratio"] = median(map(truediv, *own))
    found["behind_drain"] = median(rates["behind"])
    found["behind_drain_ratio"] = median(map(truediv, rates["behind"], rates["off"]))
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
    """What each operation costs in libraries of these sizes: see the script. On PostgreSQL, or on
    SQLite if there is none; and on MariaDB."""
    found: dict[str, Any] = {}
    for size in sizes:
        with _recording() as (url, _):
            found |= _grown(peer, url, size, f"@{_label(size)}")
        if size in MARIADB_SIZES:
            with database("mariadb") as url:
                if url is not None:
                    found |= _grown(peer, url, size, f"_mariadb@{_label(size)}")
    return found


def _grown(peer: Peer, url: str, size: int, which: str) -> dict[str, Any]:
    with Trial(peer) as trial:
        done = trial.run_inside("growth.py", trial.broker.url, url, size, timeout=3600)
        return {f"{name}{which}": value for name, value in done.items()}
