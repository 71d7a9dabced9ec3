"""What a producer is told over its standard input, one JSON object a line, and answers likewise.

Standard library only: this runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import notes

#: Numbers of tasks that are sent to warm up; they are in no result.
WARM_UP = -1


def serve(**commands: Callable[..., Any]) -> None:
    """Obey until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not come between
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": commands[request.pop("do")](**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def sparse(
    send: Callable[[int, float], Any], tasks: int, gap: float, countdown: float, seed: int
) -> list[tuple[int, float]]:
    """Send tasks one by one, `gap` seconds apart on average; (number, action time) of each.

    send: sends the task of that number, due in so many seconds
    """
    chance = random.Random(seed)
    found = []
    for number in range(tasks):
        wait = countdown * chance.uniform(0.75, 1.25)
        found.append((number, time.time() + wait))
        send(number, wait)
        time.sleep(gap * chance.uniform(0.5, 1.5))  # sparse: no two are due together
    return found


def one_by_one(
    send: Callable[[int], Any], tasks: int, seed: int, timeout: float = 20.0
) -> list[tuple[int, float, float]]:
    """Send a task whenever the one before has started, and a moment has passed.

    Returns (number, time before it was sent, time when it had been sent) of each.
    """
    chance = random.Random(seed)
    directory = os.environ["BENCH_NOTES"]
    found = []
    for number in range(tasks):
        before = notes.count(directory)
        before_it = time.time()
        send(number)
        found.append((number, before_it, time.time()))
        deadline = time.monotonic() + timeout
        while notes.count(directory) == before:
            if time.monotonic() > deadline:
                raise TimeoutError(f"task {number} has not started")
            time.sleep(0.001)  # to look more often would take the processor from the worker
        time.sleep(chance.uniform(0.02, 0.06))  # the worker is idle again
    return found
