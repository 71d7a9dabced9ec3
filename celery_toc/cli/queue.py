"""``celery toc pause``, ``resume``, ``purge`` and ``delete``: commands for a whole queue."""

from __future__ import annotations

import click

import kombu_toc

from .exits import FAILED, NOT_FOUND, Failure
from .options import SPAN, complete_queue, yes_option
from .screen import counted, listed, skipped
from .session import Session, command

# -- celery toc pause, resume, purge and delete

_queues = click.argument(
    "queues", nargs=-1, required=True, metavar="QUEUE...", shell_complete=complete_queue
)
_queue = click.argument("queue", metavar="QUEUE", shell_complete=complete_queue)


@command("""
celery -A shop toc pause mail
celery -A shop toc pause mail news --json
""")
@_queues
def pause(session: Session, queues: tuple[str, ...]) -> None:
    """Have no worker take anything from queues, until `resume`.

    Tasks can be sent as usual; what becomes due waits. What workers have taken already goes on.
    Workers know within five seconds; a worker that is started later knows at once.
    """
    _set(session, queues, True)


@command("""
celery -A shop toc resume mail
""")
@_queues
def resume(session: Session, queues: tuple[str, ...]) -> None:
    """Have workers take from paused queues again, within five seconds."""
    _set(session, queues, False)


def _set(session: Session, queues: tuple[str, ...], paused: bool) -> None:
    names = session.queues(queues)
    change = session.center.queues.pause if paused else session.center.queues.resume
    changed = [name for name in names if change(name)]
    if session.as_json:
        session.screen.json({"queues": names, "paused": paused, "changed": changed})
        return
    if changed:
        session.screen.say(f"{'Paused' if paused else 'Resumed'} {listed(changed)}.")
    if same := [name for name in names if name not in changed]:
        are = "is" if len(same) == 1 else "are"
        session.screen.say(f"{listed(same)} {are} {'already' if paused else 'not'} paused.")


@command("""
celery -A shop toc purge mail
celery -A shop toc purge mail --yes --json
""")
@_queue
@yes_option
def purge(session: Session, queue: str, yes: bool) -> None:
    """Delete all messages of a queue that wait, due or not: scheduled tasks too.

    What workers have and what is dead stays; `dead purge` deletes that. Results are not touched:
    `cancel --queue` marks them REVOKED.
    """
    [queue] = session.queues([queue])
    counts = session.center.counts(queue)
    number, schedules = 0, []
    if counts.waiting:
        session.confirm(
            f"Delete {counted(counts.waiting, 'message')} in {queue!r} "
            f"({counts.ready:,} ready, {counts.scheduled:,} scheduled)?",
            yes,
        )
        purged = session.center.queues.purge(queue)
        number, schedules = int(purged), list(purged.schedules)
    if session.as_json:
        session.screen.json({"queue": queue, "purged": number, "schedules": schedules})
    elif counts.waiting:
        session.screen.say(f"Purged {counted(number, 'message')}.")
        if schedules:
            session.screen.say(skipped(schedules), "yellow")
    else:
        session.screen.say(f"No messages wait in {queue!r}.")


@command("""
celery -A shop toc delete old-mail
celery -A shop toc delete old-mail --force --yes
""")
@_queue
@click.option("--force", is_flag=True, help="Also with messages in it, and while it is consumed.")
@yes_option
def delete(session: Session, queue: str, force: bool, yes: bool) -> None:
    """Delete a queue: its declaration, counters and bindings; with --force also its messages.

    Without --force it is refused while the queue holds anything, or a worker consumes it. Who
    sends to it, or consumes it, later declares it anew.
    """
    [queue] = session.queues([queue])
    counts, held = session.center.counts(queue), []
    for number, state in (
        (counts.ready, "ready"),
        (counts.scheduled, "scheduled"),
        (counts.in_flight, "in flight"),
        (counts.dead, "dead"),
    ):
        if number:
            held.append(f"{number:,} {state}")
    consumers = session.center.queues.consumers().get(queue, [])
    if not force:
        if held:
            raise Failure(
                f"{queue!r} holds messages: {', '.join(held)}; --force deletes them", FAILED
            )
        if consumers:
            names = ", ".join(sorted(consumer.name for consumer in consumers))
            raise Failure(f"{queue!r} is consumed by {names}; stop them first, or --force", FAILED)
    number = sum(counts)
    what = f"with {counted(number, 'message')} ({', '.join(held)})" if held else "which is empty"
    session.confirm(f"Delete {queue!r}, {what}?", yes)
    with session.app.connection_for_write() as connection:
        # And its bindings, whoever has made them: by those it would be filled again.
        connection.default_channel.queue_delete(queue)
    if session.as_json:
        session.screen.json({"queue": queue, "deleted": number})
    else:
        with_ = f", with {counted(number, 'message')}" if number else ""
        session.screen.say(f"Deleted {queue!r}{with_}.")


# -- celery toc reshard

#: The possible numbers of slots.
POWERS = tuple(2**exponent for exponent in range(10))


def _power_of_two(ctx: click.Context, param: click.Parameter, slots: int) -> int:
    """Check the number of slots before the server is asked anything."""
    if slots not in POWERS:
        raise click.UsageError(
            f"--slots must be a power of two from 1 to {POWERS[-1]}, not {slots}"
        )
    return slots


@command("""
celery -A shop toc reshard mail --slots 32
celery -A shop toc reshard mail --slots 4 --wait 10m --yes --json
""")
@click.argument("queue", shell_complete=complete_queue)
@click.option(
    "--slots",
    "-s",
    type=int,
    required=True,
    callback=_power_of_two,
    help="How many: a power of two, up to 512.",
)
@click.option(
    "--wait",
    type=SPAN,
    default="1m",
    show_default=True,
    help="How long to wait for what workers have, after everything else is moved.",
)
@click.option(
    "--settle",
    type=SPAN,
    default="35s",
    show_default=True,
    help="How long producers may take to learn of the new number.",
)
@yes_option
def reshard(
    session: Session, queue: str, slots: int, wait: float, settle: float, yes: bool
) -> None:
    """Give a queue another number of slots, while producers and workers use it.

    Nothing is lost and nothing runs early. If it is stopped halfway, run it again: it continues.
    Exit code 1 if messages are left that could not be moved yet, such as those that a worker has:
    they are delivered as usual; run it again later to finish.
    """
    center = session.center
    session.queues([queue])
    declared = center.registry.declared(queue)
    if declared is None:
        raise Failure(f"there is no queue {queue!r}", NOT_FOUND)
    before = declared.slots
    if before != slots:
        session.confirm(f"Give {queue!r} {slots} slots instead of {before}?", yes)
    told: list[int] = []

    def on_progress(state: kombu_toc.Resharded) -> None:
        if session.as_json:
            return
        if not told:
            session.screen.say(f"{queue!r} has {slots} slots; waiting until its producers know.")
        if state.moved and (not told or state.moved >= told[-1] + 10_000):
            session.screen.say(f"Moved {counted(state.moved, 'message')}, {state.left:,} to go.")
        told.append(state.moved)

    try:
        result = kombu_toc.reshard_topic(
            center.center, queue, slots, settle=settle, patience=wait, on_progress=on_progress
        )
    except kombu_toc.ReshardError as exc:
        raise Failure(exc, FAILED) from exc
    if session.as_json:
        session.screen.json(
            {
                "queue": queue,
                "slots": slots,
                "slots_before": before,
                "moved": result.moved,
                "left": result.left,
                "done": result.done,
            }
        )
    elif result.done:
        moved = counted(result.moved, "message")
        session.screen.say(f"Done: {queue!r} has {slots} slots; moved {moved}.")
    if not result.done:
        why = (
            "stay where they are, for on a Cluster nothing is moved between slots"
            if center.clustered
            else "cannot be moved yet: a worker has them, or it is not known where they belong"
        )
        session.complain(
            f"{result.left} of {queue!r} {why}; they are delivered as ever; run this again later",
            FAILED,
        )
