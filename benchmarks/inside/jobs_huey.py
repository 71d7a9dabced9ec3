"""Huey: the task, and its producer."""

from __future__ import annotations

import os

import commands
from huey import RedisHuey
from notes import note

huey = RedisHuey("bench", url=os.environ["BENCH_BROKER"])


@huey.task()
def tick(number: int) -> None:
    note(number)


if __name__ == "__main__":
    # A task's name says where it lives, and that is not this script's.
    from jobs_huey import tick as job

    def warm_up(tasks: int) -> None:
        for _ in range(tasks):
            job(commands.WARM_UP)

    commands.serve(
        warm_up=warm_up,
        sparse=lambda **options: commands.sparse(
            lambda number, wait: job.schedule((number,), delay=wait), **options
        ),
    )
