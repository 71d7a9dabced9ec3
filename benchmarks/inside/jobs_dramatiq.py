"""Dramatiq: the actor, and its producer."""

from __future__ import annotations

import os

import commands
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from notes import note

dramatiq.set_broker(RedisBroker(url=os.environ["BENCH_BROKER"]))


@dramatiq.actor(actor_name="tick")
def tick(number: int) -> None:
    note(number)


def _warm_up(tasks: int) -> None:
    for _ in range(tasks):
        tick.send(commands.WARM_UP)


if __name__ == "__main__":
    commands.serve(
        warm_up=_warm_up,
        sparse=lambda **options: commands.sparse(
            lambda number, wait: tick.send_with_options(args=(number,), delay=round(wait * 1000)),
            **options,
        ),
    )
