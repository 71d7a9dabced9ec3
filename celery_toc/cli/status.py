"""``celery toc status``, ``limits``, ``top`` and others: what queues hold, how late their messages
are delivered, what comes due; and ``check``."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import click
from redis import RedisError

import kombu_toc
from kombu_toc import Fault

from ..app.task import visibility_warnings
from . import screen
from . import session as cli
from .screen import Cell, Column, clean, counted, listed, styled
from .session import Session
from .topic import NO_QUEUES, text_of

# -- celery toc status

COLUMNS = (
    Column("queue", fold=True),
    Column("slots", right=True, spare=6),
    Column("scheduled", right=True),
    Column("ready", right=True),
    Column("in flight", right=True),
    Column("dead", right=True),
    Column("far", right=True, spare=2),
    Column("oldest", right=True, spare=3),
    Column("late p50", right=True, spare=5),
    Column("late p99", right=True, spare=1),
    Column("consumers", right=True, spare=2),
    Column("memory", right=True, spare=4),
)

#: What workers run.
RUNNING = (Column("running"), Column("task", fold=True), Column("worker", fold=True))

#: Seconds for which their answers are waited for.
ANSWER_WITHIN = 1.0

#: Of these, how late messages were delivered in the last minutes.
LATE = ("late_p50_seconds", "late_p99_seconds")


@cli.command
@cli.queues_argument
@cli.flag("--all -a every", "Also reply queues with nothing in them.")
@cli.flag("--running", "Also ask the workers which tasks they run.")
def status(session: Session, queues: tuple[str, ...], every: bool, running: bool) -> None:
    """Show what each queue holds, and how late its messages were delivered in the last minutes.

    Scheduled: waiting for their time. Ready: due and not taken yet; oldest: for how long. In
    flight: taken by a worker and not acknowledged: tasks with acks_late until they end, and others
    until they begin. So with Celery's default a task that runs is not in flight; --running asks the
    workers. Dead: given up on. Far: in the task library only, and so in no other number. Consumers:
    processes that take from the queue. Memory: what its messages use in Redis, an estimate.

    Examples:
    celery -A shop toc status
    celery -A shop toc status mail --json
    """
    rows = survey(session, queues, every=every, memory=True)
    warnings = [
        *kombu_toc.durability_warnings(session.center.client),
        *kombu_toc.outage_warnings(session.center.client),
        *visibility_warnings(session.center.limits),
        *unconsumed(rows),
        *stopped(rows),
    ]
    told = _running(session) if running else None
    shown = {
        "broker": session.broker,
        "server": session.server,
        "topics": rows,
        "warnings": warnings,
    }
    session.json(shown if told is None else {**shown, "running": told})
    session.screen.say(title(session), "bold")
    has_far = any("far" in row for row in rows)
    columns = [column for column in COLUMNS if has_far or column.name != "far"]
    session.screen.table(columns, map(line, rows), NO_QUEUES)
    if told:
        session.screen.say("")
        session.screen.table(RUNNING, [list(one.values()) for one in told])
    elif told is not None:
        session.screen.say("No worker that answers runs a task.")
    for warning in warnings:
        session.screen.say(f"Warning: {warning}.", "yellow")
    if paused := [row["queue"] for row in rows if row["paused"]]:
        are = "is" if len(paused) == 1 else "are"
        session.screen.say(
            f"{listed(paused)} {are} paused; 'celery toc resume QUEUE' ends that.", "yellow"
        )


def _running(session: Session) -> list[dict[str, str]]:
    """The tasks that workers say that they run."""
    told = session.app.control.inspect(timeout=ANSWER_WITHIN).active() or {}
    return [
        {"id": one["id"], "task": one["name"], "worker": worker}
        for worker, active in sorted(told.items())
        for one in active
    ]


def survey(
    session: Session, named: Sequence[str], *, every: bool = False, memory: bool = False
) -> list[dict[str, Any]]:
    """The contents of each queue, as in JSON.

    named: only these queues; all unless given
    every: also queues that expire by themselves, while they are empty
    memory: also the memory that each uses
    """
    center, names = session.center, session.queues(named)
    summaries = [
        one
        for name in (names if named else [None])
        for one in session.ask(center.queues.summary, name)
    ]
    measured = kombu_toc.read_metrics(center, names)
    consumers, paused = center.queues.consumers(), center.queues.paused()
    rows = []
    for summary in summaries:
        declared = center.registry.known(summary.topic)
        passing = declared is not None and declared.declaration.expires
        if passing and not any(summary.counts) and not every and summary.topic not in named:
            continue
        late = measured[summary.topic].recent_lateness if summary.topic in measured else None
        rows.append(
            {
                "queue": summary.topic,
                "slots": summary.slots,
                **summary.counts._asdict(),
                "oldest_seconds": summary.oldest_us / 1e6,
                "late_p50_seconds": late and late.quantile(0.5),
                "late_p99_seconds": late and late.quantile(0.99),
                # Replies are consumed for moments only, which nobody records.
                "consumers": None if passing else len(consumers.get(summary.topic, ())),
                "paused": summary.topic in paused,
                "target": None if declared is None else declared.declaration.target,
                "target_stopped": None if declared is None else declared.declaration.target_stopped,
            }
        )
    if memory:
        known = [] if session.missing else [row["queue"] for row in rows]  # it asks all nodes
        sizes = kombu_toc.estimate_memory(center.center, known) or {}
        for row in rows:
            name = row["queue"]
            row |= {**_count_far(center, name), "memory_bytes": sizes.get(name)}
    return rows


def _count_far(center: Any, queue: str) -> dict[str, int | None]:
    """How much of a queue is in the task library only, if it has a horizon; None: that cannot be
    asked."""
    declared = center.registry.known(queue)
    if declared is None or not declared.declaration.far:
        return {}
    try:
        return {"far": center.queues.count_far(queue).get(queue, 0)}
    except kombu_toc.LibraryError:
        return {"far": None}


def unconsumed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A warning for each queue in which messages wait and which nobody consumes."""
    return [
        f"nobody sends {row['queue']!r} to its target, in which {waiting(row)}; start "
        "'celery toc notify'"
        if row["target"]
        else f"nobody consumes {row['queue']!r}, in which {waiting(row)}; start a worker with -Q "
        f"{row['queue']}"
        for row in rows
        if row["consumers"] == 0 and row["ready"] + row["scheduled"] and not row["target_stopped"]
    ]


def stopped(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A warning for each queue whose target wants nothing any more."""
    return [
        f"the target of {row['queue']!r} is stopped ({row['target_stopped']}), and {waiting(row)}; "
        f"'celery toc topic set {row['queue']} --target URL' goes on"
        for row in rows
        if row["target_stopped"]
    ]


def waiting(row: dict[str, Any]) -> str:
    """How many messages wait in a queue."""
    return counted(row["ready"] + row["scheduled"], "message", "wait")


def line(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    oldest, consumers = row["oldest_seconds"], row["consumers"]
    waits = row["ready"] + row["scheduled"]
    if row["paused"]:
        consumers = Cell("paused", "yellow")
    elif consumers == 0 and waits:
        consumers = Cell(0, "yellow")
    size = row.get("memory_bytes")
    late = {name.removesuffix("_seconds"): row[name] for name in LATE}
    return {
        **row,
        "ready": Cell(row["ready"], "yellow" if row["ready"] else ""),
        "dead": Cell(row["dead"], "red" if row["dead"] else ""),
        "far": _far(row),
        "oldest": Cell(cli.span(oldest), "yellow" if oldest >= 1 else "") if oldest else None,
        **{name: None if s is None else cli.milliseconds(s) for name, s in late.items()},
        "consumers": consumers,
        "memory": None if size is None else _bytes(size),
    }


def _far(row: dict[str, Any]) -> Any:
    if "far" not in row:
        return None
    return Cell("?", "yellow") if row["far"] is None else row["far"]


def _bytes(number: float) -> str:
    """``0B``, ``812B``, ``4.2kB``, ``310MB``: about, as it is an estimate."""
    return screen.scaled(number, ("B", "kB", "MB", "GB", "TB"), 9.95)


def title(session: Session) -> str:
    """The heading: broker and server."""
    return f"{session.broker}  {' '.join(filter(None, session.server.values()))}"


# -- celery toc check and repair

FAULT_COLUMNS = (
    Column("queue"),
    Column("slot", right=True),
    Column("fault"),
    Column("id", fold=True),
    Column("in", fold=True),
)


@cli.command
@cli.queues_argument
def check(session: Session, queues: tuple[str, ...]) -> None:
    """Look through queues for inconsistencies, such as an id without a body.

    The queues may be in use meanwhile. Exit code 5 if something is found.

    Examples:
    celery -A shop toc check
    celery -A shop toc check mail --json
    """
    center = session.center
    if _report(session, _found(session, center.admin.check, session.queues(queues))):
        session.exit_code = cli.FAULTS


@cli.command
@cli.queues_argument
@cli.yes_option
def repair(session: Session, queues: tuple[str, ...]) -> None:
    """Mend what `check` finds.

    The queues may be in use meanwhile. An id without a body is removed; a body without an id goes
    to the dead messages.

    Examples:
    celery -A shop toc repair
    celery -A shop toc repair mail --yes --json
    """
    center, names = session.center, session.queues(queues)
    if not session.yes:
        found = len(_found(session, center.admin.check, names))
        if found:
            session.confirm(f"Repair {counted(found, 'inconsistency')}?")
    _report(session, _found(session, center.admin.repair, names))


def _found(session: Session, look: Callable[[str], list[Fault]], names: Iterable[str]) -> list[Any]:
    """The faults of queues. A key of another type is named once, also if it is of no single one."""
    every = (fault for name in names for fault in session.ask(look, name))
    return list({f.id if f.kind == "other type" else f: f for f in every}.values())


def _report(session: Session, found: list[Fault]) -> list[Fault]:
    faults = [
        {**cli.document(one, "topic slot kind places"), "id": one.id or None} for one in found
    ]
    rows = [[f.topic, f.slot, f.kind, f.id or None, ", ".join(f.places)] for f in found]
    session.show({"faults": faults}, FAULT_COLUMNS, rows, "No inconsistencies found.")
    return found


# -- celery toc metrics


def _address(value: str) -> tuple[str, int]:
    """``host:port``, ``:port`` for all addresses of the machine, ``port`` for its loopback."""
    host, colon, port = value.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not an address; write HOST:PORT, or :9808")
    if not host:
        host = "0.0.0.0" if colon else "127.0.0.1"
    return host.removeprefix("[").removesuffix("]"), int(port)


@cli.command
@cli.option(
    "--serve address",
    "[HOST]:PORT",
    "Serve them over HTTP at this address until Ctrl-C; without HOST, at all addresses.",
    type=cli.Read("address", _address),
)
def metrics(session: Session, address: tuple[str, int] | None) -> None:
    """Queue depths, counters and lateness in Prometheus's text format.

    Without --serve they are printed once. One exporter is enough for any number of workers:
    everything is read from Redis.

    Examples:
    celery -A shop toc metrics
    celery -A shop toc metrics --serve :9808
    celery -A shop toc metrics --serve 127.0.0.1:9808
    """
    kombu_toc.check_installed("this command", "metrics", "prometheus_client")
    from .. import metrics as exporter

    session.center.client.ping()  # fails at once if the broker is down
    if session.as_json or address is None:
        registry = exporter.registry(session.center)
        samples = [sample for family in registry.collect() for sample in family.samples]
        if session.as_json:
            session.screen.json(
                [{**cli.document(one, "name labels"), "value": float(one.value)} for one in samples]
            )
        else:
            lines = exporter.metrics_text(session.center).split("\n")
            if session.screen.is_terminal:  # a name of a queue may have control characters
                lines = [clean(line) for line in lines]
            click.echo("\n".join(lines), nl=False)
        for one in samples:
            if one.name == "celery_toc_slots_missing":
                where = "{topic!r} at {server}".format(**one.labels)
                session.complain(f"no answer from {one.value:.0f} slots of {where}", cli.PARTIAL)
        return
    host, port = address
    try:
        server, thread = exporter.serve(session.center, host, port)
    except OSError as exc:
        raise cli.Failure(f"cannot serve at {host}:{port}: {exc.strerror or exc}") from exc
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"Serving metrics at http://{shown}:{server.server_port}/metrics", err=True)
    try:
        thread.join()
    except KeyboardInterrupt:  # the way to end it
        server.shutdown()


# -- celery toc limits

LIMIT_COLUMNS = (
    Column("queue", fold=True),
    Column("limit"),
    Column("value", right=True),
    Column("used", right=True),
    Column("next in", right=True),
    Column("waiting", right=True, spare=1),
    Column("keys waiting", right=True, spare=2),
    Column("oldest", right=True, spare=3),
)


@cli.command
@cli.queues_argument
def limits(session: Session, queues: tuple[str, ...]) -> None:
    """Show what queues limit, what is used of it, and what waits for it.

    Used: of a rate, how many of those that may come at once; of `concurrency`, how many run; of
    a limit of each key, how many keys it holds back (`key rate`), of how many something runs, or
    how many take turns. Next in: when the next may start. Waiting: messages that are due.

    Examples:
    celery -A shop toc limits
    celery -A shop toc limits mail --json
    """
    usages = []
    for name in session.queues(queues):
        used: kombu_toc.Usage | None = session.ask(session.center.queues.usage, name)
        if used is not None and (used.limits or queues):
            usages.append(used)
    nothing = "No queue limits anything: 'celery toc topic set QUEUE --rate 100/s'."
    rows = [row for usage in usages for row in _rows(usage)]
    session.show({"limits": list(map(_described, usages))}, LIMIT_COLUMNS, rows, nothing)


def _described(usage: kombu_toc.Usage) -> dict[str, Any]:
    """A queue, as in JSON."""
    return {
        **cli.document(usage, "topic running waiting keys_waiting"),
        "limits": [
            {
                **cli.document(limit, "value used of"),
                **{"limit": limit.name, "opens_seconds": limit.opens_us / 1e6},
            }
            for limit in usage.limits
        ],
        "oldest_seconds": usage.oldest_us / 1e6,
    }


def _rows(usage: kombu_toc.Usage) -> list[list[Any]]:
    """The rows of a queue; what waits in it is said once."""
    rows = []
    for number, one in enumerate(usage.limits):
        is_full = one.of is not None and one.used >= one.of
        used = str(one.used) if one.of is None else f"{one.used}/{one.of}"
        rest: list[Any] = [None] * 3
        if not number:
            oldest = usage.oldest_us / 1e6
            rest = [usage.waiting, usage.keys_waiting, cli.span(oldest) if oldest else None]
        rows.append(
            [
                usage.topic,
                one.name.replace("_", " "),
                text_of(one.name, one.value),
                Cell(used, "yellow" if is_full and usage.waiting else ""),
                cli.milliseconds(one.opens_us / 1e6) if one.opens_us else None,
                *rest,
            ]
        )
    return rows


# -- what celery toc top draws

#: Counters that are shown as rates per second.
RATES = ("put", "delivered", "acked", "dead")

#: Columns of `status` that are left out here.
_LEFT_OUT = ("slots", "memory", "far")

TOP_COLUMNS = (
    *(column for column in COLUMNS if column.name not in _LEFT_OUT),
    *(
        Column(f"{name}/s", right=True, spare=spare)
        for name, spare in zip(RATES, (2, 1, 4, 7), strict=True)
    ),
)

#: Bars of the chart, and its height in lines.
WIDTH, HEIGHT = 60, 5

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    return {**line(row), **{f"{name}/s": _rate(row["per_second"][name]) for name in RATES}}


def _rate(number: float | None) -> str | None:
    if number is None:
        return None
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def view(
    heading: str,
    snapshot: dict[str, Any],
    width: int,
    height: int,
    *,
    trouble: str = "",
    colors: bool = True,
    blocks: bool = True,
) -> list[str]:
    """Draw a snapshot, in at most so many columns and lines.

    snapshot: as ``top --json`` prints it
    trouble: why it is not up to date
    blocks: whether the terminal has block characters
    """
    coming = snapshot["coming"]
    ahead, due = coming["span_seconds"], coming["due"]
    lines = [styled(clean(heading)[:width], "bold", colors)]
    if trouble:
        lines.append(styled(clean(trouble)[:width], "red", colors))
    comes = (
        f"coming due  {sum(due):,} within {cli.span(ahead)}, at most {max(due):,} in "
        f"{cli.span(ahead / len(due))}"
    )
    chart = [
        "",
        comes[:width],
        *(styled(bar[:width], "cyan", colors) for bar in bars(due, HEIGHT, blocks=blocks)),
        styled(_axis(ahead)[:width], "dim", colors),
    ]
    rows = snapshot["topics"]
    fitting = screen.fitted(TOP_COLUMNS, [cells(row) for row in rows], width)
    table, *drawn = screen.drawn_table(fitting, colors=colors)
    room = height - len(lines) - len(table)
    if sum(map(len, drawn)) > room - len(chart) and room - len(chart) < 4:
        chart = []
    room -= len(chart)
    if sum(map(len, drawn)) > room:
        drawn = _liveliest(rows, drawn, room - 1)
        left = len(rows) - len(drawn)
        drawn.append([f"... and {counted(left, 'queue')} with less to do"[:width]])
    return [*lines, *table, *itertools.chain(*drawn), *chart]


def _liveliest(
    rows: Sequence[dict[str, Any]], drawn: Sequence[list[str]], room: int
) -> list[list[str]]:
    """The lines of the queues with the most to do, as many as there is room for, in their order."""

    def liveliness(at: int) -> tuple[float, ...]:
        row = rows[at]
        rates = row["per_second"]
        return (
            -(row["ready"] + row["in_flight"]),
            -(rates["delivered"] or 0) - (rates["put"] or 0),
            -row["scheduled"],
            at,
        )

    kept = []
    for at in sorted(range(len(rows)), key=liveliness):
        room -= len(drawn[at])
        if room < 0:
            break
        kept.append(at)
    return [drawn[at] for at in sorted(kept)]


def bars(numbers: Sequence[int], height: int, *, blocks: bool = True) -> list[str]:
    """A bar for each number, as lines of text from the top; a number above 0 is always visible."""
    most = max(max(numbers), 1)
    characters = _EIGHTHS if blocks else " ....####"
    eighths = [-(-number * height * 8 // most) for number in numbers]
    return [
        "".join(characters[min(max(eighth - 8 * row, 0), 8)] for eighth in eighths)
        for row in reversed(range(height))
    ]


def _axis(ahead: float) -> str:
    """Four times, below the bars."""
    part = WIDTH // 4
    marks = [f"+{cli.span(ahead * number / 4)}" if number else "now" for number in range(4)]
    return "".join(mark.ljust(part) for mark in marks)


# -- celery toc top

#: Errors of a server that is away for a while: the next snapshot may succeed.
AWAY = (RedisError, kombu_toc.TocError, OSError)

#: Seconds over which a rate is taken, at least and at most: processes send their counters every
#: five seconds. Until then, a rate is that of the last minute or two.
MIN_WINDOW, WINDOW = 15.0, 30.0


@cli.command
@cli.queues_argument
@cli.option("--interval -i", "SPAN", "Time between two looks.", default="1")
@cli.option("--span", "SPAN", "How far the time line reaches.", default="10m")
@cli.option("--count -c", "N", "End after so many looks.")
def top(
    session: Session, queues: tuple[str, ...], interval: float, span: float, count: int | None
) -> None:
    """A live view: what each queue holds, rates, lateness, and a time line of what comes due.

    q or Ctrl-C ends it. Without a terminal it prints a line for each queue and look; with --json,
    a JSON document for each look. While Redis is away it says so, and keeps trying.

    Examples:
    celery -A shop toc top
    celery -A shop toc top mail --span 1h --interval 2
    celery -A shop toc top --count 10 --json
    """
    if not span:
        raise click.UsageError("--span must be more than 0")
    snapshots = _Snapshots(session, queues, span)
    show = _live if session.screen.is_terminal else _lines
    with suppress(KeyboardInterrupt):  # the way to end it
        show(session, snapshots, max(interval, 0.1), count)


class _Snapshots:
    """Takes snapshots of the queues; rates are the difference between two of them."""

    def __init__(self, session: Session, queues: Sequence[str], span: float) -> None:
        self._session = session
        self._queues = queues
        self._span = span
        #: Redis's clock at the last snapshot
        self.now = 0.0
        #: the last snapshot
        self.latest: dict[str, Any] = {}
        #: a line that says that the server is away; empty while it answers
        self.trouble = ""
        #: monotonic seconds
        self._away_since = 0.0
        self._samples: deque[tuple[float, dict[str, dict[str, int]]]] = deque()

    def try_to_take(self) -> bool:
        """Take a snapshot; return False if the server is away. The first one must succeed."""
        try:
            self.latest = self._take()
        except AWAY as exc:
            if not self.latest:
                raise
            now = time.monotonic()
            self._away_since = self._away_since if self.trouble else now
            gone, error = cli.span(now - self._away_since), " ".join(str(exc).split())
            reason = error or type(exc).__name__
            self.trouble = f"Redis has been away for {gone}, trying again: {reason}"
            return False
        self.trouble = ""
        return True

    def _take(self) -> dict[str, Any]:
        """A new snapshot, as in JSON."""
        session = self._session
        seconds, microseconds = session.center.client.time()
        self.now = now = seconds + microseconds / 1e6
        rows = survey(session, self._queues)
        names = [row["queue"] for row in rows]
        measured = kombu_toc.read_metrics(session.center, names, minutes=1)
        self._samples.append((now, {name: found.totals for name, found in measured.items()}))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()
        for row in rows:
            found = measured.get(row["queue"])
            row["per_second"] = {name: found and self._rate(found, name) for name in RATES}
        return {
            "time": cli.iso(now),
            "topics": rows,
            "coming": {
                "span_seconds": self._span,
                "due": self._coming([row["queue"] for row in rows if row["scheduled"]]),
            },
        }

    def _rate(self, measured: kombu_toc.Measured, counter: str) -> float:
        began, before = self._samples[0]
        seconds = self._samples[-1][0] - began
        first = before.get(measured.topic)
        if seconds < MIN_WINDOW or first is None:
            return measured.rate(counter)
        return max(measured.totals[counter] - first[counter], 0) / seconds

    def _coming(self, queues: Sequence[str]) -> list[int]:
        """How many messages come due in each part of the span."""
        edges = [self._span * number / WIDTH for number in range(WIDTH + 1)]
        due = [self._session.center.queues.coming(name, edges) for name in queues]
        by = [sum(column) for column in zip(*due, strict=True)] or [0] * (WIDTH + 1)
        return [later - sooner for sooner, later in itertools.pairwise(by)]


def _lines(session: Session, snapshots: _Snapshots, interval: float, count: int | None) -> None:
    """Print each snapshot below the one before."""
    columns = (Column("time"), *TOP_COLUMNS)
    for number in itertools.count() if count is None else range(count):
        if number:
            time.sleep(interval)
        was_away = bool(snapshots.trouble)
        if not snapshots.try_to_take():
            if not was_away:
                click.echo(clean(snapshots.trouble), err=True)
            continue
        if was_away:
            click.echo("Redis is back.", err=True)
        snapshot = snapshots.latest
        if session.as_json:
            session.screen.json(snapshot)
            continue
        at = snapshot["time"].partition("T")[2]
        rows = [{"time": at, **cells(row)} for row in snapshot["topics"]]
        heading, *lines = screen.plain_table(columns, rows).splitlines()
        for text in lines if number else (heading, *lines):
            session.screen.say(text)


def _live(session: Session, snapshots: _Snapshots, interval: float, count: int | None) -> None:
    """Draw each snapshot in place of the one before, until q is typed."""
    snapshots.try_to_take()  # before the screen changes: if this fails, the error is seen
    heading = title(session)
    with screen.Terminal(alternate=count is None) as terminal:
        for number in itertools.count() if count is None else range(count):
            if number:
                snapshots.try_to_take()

            def draw() -> list[str]:
                size = shutil.get_terminal_size()
                at = cli.local(snapshots.now, session.zone)[11:]
                return view(
                    f"{heading}  {at}",
                    snapshots.latest,
                    size.columns,
                    size.lines - (count is not None),  # the cursor's own
                    trouble=snapshots.trouble,
                    colors=session.screen.colors,
                    blocks=terminal.blocks,
                )

            terminal.show(draw())
            last = count is not None and number == count - 1
            if not last and terminal.wait(interval, draw):
                return
