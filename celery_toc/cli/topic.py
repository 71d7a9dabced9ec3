"""``celery toc topic``: what queues are declared with, and how that is changed while they are in
use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

import kombu_toc

from . import session as cli
from .screen import Cell, Column, counted, listed, skipped
from .session import Session

COLUMNS = (
    Column("queue", fold=True),
    Column("slots", right=True),
    Column("retries", right=True),
    Column("visibility", right=True),
    Column("back-off", right=True, spare=2),
    Column("steps", spare=4),
    Column("expires", right=True, spare=5),
    Column("consumers", right=True, spare=1),
)

#: What takes a limit back to the connection's default; and those of starts, keys and puts away.
DEFAULT = "default"
NONE = "none"

#: Limits that a queue has only if it was declared with them.
_UNLESS_SAID = frozenset((*kombu_toc.TERMS, *kombu_toc.LIBRARY_TERMS, *kombu_toc.NOTIFIER_TERMS))

#: Limits that only `declare` takes.
_DECLARED_ONCE = ("slots", "expires")

NO_QUEUES = "There are no queues yet: a worker declares its own when it starts."

_queue = click.argument("queue", metavar="QUEUE", shell_complete=cli.complete_queue)


topic = cli.Group(
    "topic",
    help="What queues are declared with: list, show, declare, set, delete.",
    commands_at=dict.fromkeys(("list", "show", "declare", "set", "delete"), __name__),
)


# -- options, one for each limit


def _limit_type(limit: str, may_be_default: bool) -> cli.Read:
    """A limit as it is declared.

    may_be_default: whether it may be `DEFAULT`, and then becomes that text
    """
    unit = getattr(kombu_toc.LIMITS.get(limit), "unit", "")
    defaults = (DEFAULT, NONE) if limit in _UNLESS_SAID else (DEFAULT,)

    def read(value: Any) -> Any:
        if may_be_default and value in defaults:
            return DEFAULT
        if limit == "steps":
            return value.split(",")
        if unit:
            seconds = kombu_toc.read_span(value)
            value = round(seconds * 1000) if unit == "milliseconds" else seconds
        return kombu_toc.LIMITS[limit].read(option_of(limit), value)

    return cli.Read(limit, read)


def option_of(limit: str) -> str:
    return "--priority-steps" if limit == "steps" else f"--{limit.replace('_', '-')}"


def _limit_options(names: tuple[str, ...], may_be_default: bool) -> Callable[[Any], Any]:
    return cli.together(
        *(
            cli.option(
                f"{option_of(name)} {name}",
                *_OPTIONS[name],
                type=_limit_type(name, may_be_default),
            )
            for name in names
        )
    )


#: Of each limit, how its option's value is written, and the help.
_OPTIONS = {
    "slots": ("N", "How many: a power of two, up to 512."),
    "retries": ("N", "Redeliveries of a message, 0 to 31."),
    "visibility": ("SPAN", "How long a delivery lasts without a renewal."),
    "expires": ("SPAN", "Delete the queue when nobody has used it for so long."),
    "retry_backoff": ("SPAN", "How long a message waits after its first failed delivery."),
    "retry_backoff_max": ("SPAN", "The longest of these waits."),
    "dead_age": ("SPAN", "How long DeadQueue keeps a message."),
    "dead_limit": ("N", "How many messages DeadQueue keeps."),
    "max_lease": ("SPAN", "How long one delivery may be renewed in all; 0: for ever."),
    "message_ttl": ("SPAN", "When a message expires, counted from its due time."),
    "dead_expired": ("yes|no", "Whether an expired message goes to DeadQueue."),
    "requeue_limit": ("N", "How often a message may be requeued on purpose before it is dead."),
    "rate": ("RATE", "Starts of the whole queue: 100/s, 10/m, 5000/h."),
    "rate_burst": ("N", "How many of these may come at once."),
    "concurrency": ("N", "How many of the queue run at once."),
    "key_rate": ("RATE", "Starts of each key: 10/m."),
    "key_burst": ("N", "How many of these may come at once."),
    "key_concurrency": ("N", "How many of each key run at once."),
    "key_order": ("serial", "serial: of each key one at a time, strictly in order."),
    "key_retry": ("hold|later", "With serial: hold, or later: what comes back lets others pass."),
    "key_fair": ("yes|no", "Whether keys take turns."),
    "key_weights": ("KEY=N,...", "How much more often a key has its turn: gold=3,silver=2."),
    "put_rate": ("RATE", "How many may be added to the queue: 100/s."),
    "key_put_rate": ("RATE", "How many may be added of each key."),
    "key_header": ("NAME", "The header that names the key of a message."),
    "library": ("MODE", "How the task library keeps the queue: through, outbox, behind, or off."),
    "guard": ("yes|no", "Whether what has ended in the library is not run again."),
    "horizon": ("SPAN", "What is further away is in the task library only."),
    "target": ("URL", "The URL that the notifier sends the queue's messages to."),
    "steps": ("N,N...", "The priority levels, such as 0,3,6,9."),
}
_ALTERABLE = (*(name for name in kombu_toc.LIMITS if name not in _DECLARED_ONCE), "steps")


# -- commands


@cli.command
@cli.queues_argument
@cli.flag("--all -a every", "Also queues that expire.")
def list_(session: Session, queues: tuple[str, ...], every: bool) -> None:
    """Show what each queue is declared with.

    A value in parentheses is the app's own: the queue was declared without.

    Examples:
    celery -A shop toc topic list
    celery -A shop toc topic list --json
    """
    descriptions = []
    for name in session.queues(queues):
        found = session.ask(session.center.queues.describe, name)
        if every or queues or found.expires_ms is None:
            descriptions.append(found)
    shown = {"topics": list(map(described, descriptions))}
    session.show(shown, COLUMNS, map(_line, descriptions), NO_QUEUES)


@cli.command
@_queue
def show(session: Session, queue: str) -> None:
    """Show what a queue is declared with, where each limit comes from, and what is in it.

    Examples:
    celery -A shop toc topic show mail
    celery -A shop toc topic show mail --json
    """
    [queue] = session.queues([queue])
    _show(session, session.ask(session.center.queues.describe, queue))


@cli.command
@_queue
@_limit_options((*_DECLARED_ONCE, *_ALTERABLE), False)
def declare(session: Session, queue: str, **limits: Any) -> None:
    """Declare a queue before anybody uses it. Refused if there is one of that name.

    Examples:
    celery -A shop toc topic declare mail --slots 16 --retries 3
    """
    if queue in session.center.queues.names():
        raise cli.Failure(
            f"there is a queue {queue!r}; 'celery toc topic set {queue}' changes its limits"
        )
    session.center.queues.declare(queue, **{k: v for k, v in limits.items() if v is not None})
    _show(session, session.ask(session.center.queues.describe, queue))


@cli.command
@_queue
@_limit_options(_ALTERABLE, True)
def set_(session: Session, queue: str, **limits: Any) -> None:
    """Change limits of a queue while it is in use; `default` takes one back to the app's.

    What limits starts, keys and puts (--rate and those below it) is taken away by `none`.
    Workers and senders know within five seconds. Another number of slots: `reshard`.

    Examples:
    celery -A shop toc topic set mail --retries 3 --visibility 5m
    celery -A shop toc topic set mail --visibility default
    celery -A shop toc topic set mail --rate 100/s --key-concurrency 1
    celery -A shop toc topic set mail --rate none
    celery -A shop toc topic set mail --target https://shop.example.com/hook
    """
    asked = {name: limits[name] for name in _ALTERABLE if limits[name] is not None}
    wanted = {name: None if value == DEFAULT else value for name, value in asked.items()}
    if not wanted:
        raise click.UsageError(f"say what: {', '.join(map(option_of, _ALTERABLE))}")
    center = session.center
    [queue] = session.queues([queue])
    before = session.ask(center.queues.describe, queue)
    center.queues.alter(queue, **wanted)
    after = session.ask(center.queues.describe, queue)
    changed = [name for name in wanted if before.limits[name] != after.limits[name]]
    session.json({**described(after), "changed": changed})
    for name in changed:
        was, now = (_shown(name, one.limits[name]) for one in (before, after))
        session.screen.say(f"{name.replace('_', ' ')} of {queue!r}: {now}; it was {was}.")
    if before.target_stopped and not after.target_stopped and after.limits["target"].value:
        session.screen.say("Its target was stopped, and is sent to again.")
    if changed:
        session.screen.say("Workers and senders know within five seconds.")
    if same := [name.replace("_", " ") for name in wanted if name not in changed]:
        session.screen.say(f"Unchanged: {', '.join(same)}.")
    if after.closed_steps:
        steps = ",".join(map(str, after.closed_steps))
        session.screen.say(f"Messages that wait under {steps} are delivered like the others.")


# -- how it is shown


def described(description: kombu_toc.Description) -> dict[str, Any]:
    """A queue, as in JSON."""
    expires = description.expires_ms
    return {
        **cli.document(
            description, "topic slots closed_steps draining_counts paused target_stopped"
        ),
        "limits": {name: limit._asdict() for name, limit in description.limits.items()},
        "expires_seconds": None if expires is None else expires / 1000,
        **description.counts._asdict(),
        "consumers": sorted(consumer.name for consumer in description.consumers),
    }


def _show(session: Session, description: kombu_toc.Description) -> None:
    session.json(described(description))
    expires, closed = description.expires_ms, ",".join(map(str, description.closed_steps))
    consumers = sorted(consumer.name for consumer in description.consumers)
    session.screen.fields(
        [
            ("queue", description.topic),
            ("slots", description.slots),
            ("former slots", ", ".join(map(str, description.draining_counts)) or None),
            *(
                (name.replace("_", " "), _shown(name, limit))
                for name, limit in description.limits.items()
                if limit.value is not None or name not in _UNLESS_SAID
            ),
            ("closed steps", closed or None),
            ("expires", expires and f"{_exactly(expires / 1000)} after its last use"),
            ("target stopped", description.target_stopped),
            ("paused", "yes" if description.paused else "no"),
            *((name.replace("_", " "), n) for name, n in description.counts._asdict().items()),
            ("consumers", listed(consumers) if consumers else "none"),
        ]
    )


def _line(description: kombu_toc.Description) -> list[Any]:
    limits: Mapping[str, kombu_toc.Limit] = description.limits
    expires = description.expires_ms

    def cell(name: str) -> str:
        text = text_of(name, limits[name].value)
        return f"({text})" if limits[name].source == DEFAULT else text

    return [
        description.topic,
        description.slots,
        *map(cell, ("retries", "visibility", "retry_backoff", "steps")),
        None if expires is None else _exactly(expires / 1000),
        Cell("paused", "yellow") if description.paused else len(description.consumers),
    ]


def _shown(name: str, limit: kombu_toc.Limit) -> str:
    return f"{text_of(name, limit.value)} ({limit.source})"


def text_of(name: str, value: Any) -> str:
    """A limit's value, with its unit."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "steps":
        return ",".join(map(str, value))
    if name == "key_weights":
        return ", ".join(f"{key}={weight:.15g}" for key, weight in value.items())
    unit = getattr(kombu_toc.LIMITS[name], "unit", "")
    if unit:
        return _exactly(value / 1000 if unit == "milliseconds" else value)
    return str(value)


def _exactly(seconds: float) -> str:
    """A span of time as it was declared."""
    return f"{seconds:.15g}s"


# -- celery toc pause, resume, purge and delete

_queues = click.argument(
    "queues", nargs=-1, required=True, metavar="QUEUE...", shell_complete=cli.complete_queue
)


@cli.command
@_queues
def pause(session: Session, queues: tuple[str, ...]) -> None:
    """Have no worker take anything from queues, until `resume`.

    Tasks can be sent as usual; what becomes due waits. What workers have taken already goes on.
    Workers know within five seconds; a worker that is started later knows at once.

    Examples:
    celery -A shop toc pause mail
    celery -A shop toc pause mail news --json
    """
    _set_paused(session, queues, True)


@cli.command
@_queues
def resume(session: Session, queues: tuple[str, ...]) -> None:
    """Have workers take from paused queues again, within five seconds.

    Examples:
    celery -A shop toc resume mail
    """
    _set_paused(session, queues, False)


def _set_paused(session: Session, queues: tuple[str, ...], paused: bool) -> None:
    names = session.queues(queues)
    change = session.center.queues.pause if paused else session.center.queues.resume
    changed = [name for name in names if change(name)]
    same = [name for name in names if name not in changed]
    are = "is" if len(same) == 1 else "are"
    session.tell(
        {"queues": names, "paused": paused, "changed": changed},
        f"{'Paused' if paused else 'Resumed'} {listed(changed)}." if changed else "",
        f"{listed(same)} {are} {'already' if paused else 'not'} paused." if same else "",
    )


@cli.command
@_queue
@cli.yes_option
def purge(session: Session, queue: str) -> None:
    """Delete all messages of a queue that wait, due or not: scheduled tasks too.

    What workers have and what is dead stays; `dead purge` deletes that. Results are not touched:
    `cancel --queue` marks them REVOKED.

    Examples:
    celery -A shop toc purge mail
    celery -A shop toc purge mail --yes --json
    """
    [queue] = session.queues([queue])
    counts = session.center.counts(queue)
    number, schedules = 0, []
    if counts.waiting:
        session.confirm(
            f"Delete {counted(counts.waiting, 'message')} in {queue!r} "
            f"({counts.ready:,} ready, {counts.scheduled:,} scheduled)?",
        )
        with session.progress("Purging", counts.waiting) as bar:
            purged = session.center.queues.purge(queue, on_progress=bar)
        number, schedules = int(purged), list(purged.schedules)
    done = f"Purged {counted(number, 'message')}."
    session.tell(
        {"queue": queue, "purged": number, "schedules": schedules},
        done if counts.waiting else f"No messages wait in {queue!r}.",
        notes=[skipped(schedules)],
    )


@cli.command
@_queue
@cli.flag("--force", "Also with messages in it, and while it is consumed.")
@cli.yes_option
def delete(session: Session, queue: str, force: bool) -> None:
    """Delete a queue: its declaration, counters and bindings; with --force also its messages.

    Without --force it is refused while the queue holds anything, or a worker consumes it. Who
    sends to it, or consumes it, later declares it anew.

    Examples:
    celery -A shop toc delete old-mail
    celery -A shop toc delete old-mail --force --yes
    """
    [queue] = session.queues([queue])
    counts = session.center.counts(queue)
    held = [f"{n:,} {state.replace('_', ' ')}" for state, n in counts._asdict().items() if n]
    consumers = session.center.queues.consumers().get(queue, [])
    if not force:
        if held:
            raise cli.Failure(f"{queue!r} holds messages: {', '.join(held)}; --force deletes them")
        if consumers:
            names = ", ".join(sorted(consumer.name for consumer in consumers))
            raise cli.Failure(f"{queue!r} is consumed by {names}; stop them first, or --force")
    number = sum(counts)
    what = f"with {counted(number, 'message')} ({', '.join(held)})" if held else "which is empty"
    session.confirm(f"Delete {queue!r}, {what}?")
    with session.app.connection_for_write() as connection:
        # And its bindings, whoever has made them: by those it would be filled again.
        connection.default_channel.queue_delete(queue)
    with_ = f", with {counted(number, 'message')}" if number else ""
    session.tell({"queue": queue, "deleted": number}, f"Deleted {queue!r}{with_}.")


# -- celery toc reshard


@cli.command
@click.argument("queue", shell_complete=cli.complete_queue)
@cli.option(
    "--slots -s",
    "N",
    "How many: a power of two, up to 512.",
    type=_limit_type("slots", False),
    required=True,
)
@cli.option(
    "--wait",
    "SPAN",
    "How long to wait for what workers have, after everything else is moved.",
    default="1m",
)
@cli.option(
    "--settle", "SPAN", "How long producers may take to learn of the new number.", default="35s"
)
@cli.yes_option
def reshard(session: Session, queue: str, slots: int, wait: float, settle: float) -> None:
    """Give a queue another number of slots, while producers and workers use it.

    Nothing is lost and nothing runs early. If it is stopped halfway, run it again: it continues.
    Exit code 1 if messages are left that could not be moved yet, such as those that a worker has:
    they are delivered as usual; run it again later to finish.

    Examples:
    celery -A shop toc reshard mail --slots 32
    celery -A shop toc reshard mail --slots 4 --wait 10m --yes --json
    """
    center = session.center
    session.queues([queue])
    declared = center.registry.declared(queue)
    if declared is None:
        raise cli.Failure(f"there is no queue {queue!r}", cli.NOT_FOUND)
    before = declared.slots
    if before != slots:
        session.confirm(f"Give {queue!r} {slots} slots instead of {before}?")
        session.screen.say(
            f"Waiting until the producers of {queue!r} know of {slots} slots.", "dim"
        )
    with session.progress("Moving") as bar:
        result = kombu_toc.reshard_topic(
            center.center, queue, slots, settle=settle, patience=wait, on_progress=bar
        )
    moved = counted(result.moved, "message")
    session.tell(
        {
            **cli.document(result, "moved left done"),
            **{"queue": queue, "slots": slots, "slots_before": before},
        },
        f"Done: {queue!r} has {slots} slots; moved {moved}." if result.done else "",
    )
    if not result.done:
        session.complain(
            f"{result.left} of {queue!r} cannot be moved yet: a worker has them, or it is not "
            "known where they belong; they are delivered as ever; run this again later"
        )
