"""``celery toc reshard``: give a queue another number of slots, while it is in use."""

from __future__ import annotations

import click

import kombu_toc

from .exits import FAILED, NOT_FOUND, Command, Failure
from .options import SPAN, complete_queue, yes_option
from .session import Session, with_session
from .wording import counted

#: The possible numbers of slots.
POWERS = tuple(2**exponent for exponent in range(10))


def _power_of_two(ctx: click.Context, param: click.Parameter, slots: int) -> int:
    """Check the number of slots before the server is asked anything."""
    if slots not in POWERS:
        raise click.UsageError(
            f"--slots must be a power of two from 1 to {POWERS[-1]}, not {slots}"
        )
    return slots


@click.command(
    cls=Command,
    example="""
celery -A shop toc reshard mail --slots 32
celery -A shop toc reshard mail --slots 4 --wait 10m --yes --json
""",
)
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
@with_session
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
    declared = center.declared(queue)
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
                "topic": queue,
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
