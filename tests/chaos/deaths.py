"""Kills the process that it is in at a step that it takes for the task library: a statement, or a
command to the broker; before it is sent, or when its reply has come.

``CHAOS_DEATHS`` is how many seconds a process lives, as a rule; ``CHAOS_DEATHS_UNTIL``, in seconds
since the epoch, is when this ends.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.connection import AbstractConnection

from kombu_toc.library.shards import Database

#: Where it is told who has died, where, and when.
DEATHS = "deaths"

WHEN = ("before", "after")
STEPS = ("statement", "command")


class _Fate:
    """When, and where, a process dies."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        dice = random.Random(os.urandom(8))
        self.at = time.monotonic() + dice.expovariate(1 / float(os.environ["CHAOS_DEATHS"])) + 1.0
        self.step, self.when = dice.choice(STEPS), dice.choice(WHEN)
        #: a few of such steps are spared, so that it is any of them
        self.spared = dice.randrange(6)


_fates: dict[int, _Fate] = {}


def _pass(step: str, when: str, what: str) -> None:
    fate = _fates.get(os.getpid())
    if fate is None:
        fate = _fates[os.getpid()] = _Fate()
    if (step, when) != (fate.step, fate.when) or time.monotonic() < fate.at:
        return
    if time.time() > float(os.environ["CHAOS_DEATHS_UNTIL"]):
        return
    if fate.spared:
        fate.spared -= 1
        return
    fate.at = float("inf")  # telling it is no step of it
    told = {
        "at": time.time(),
        "pid": os.getpid(),
        "worker": os.environ.get("CHAOS_WORKER", ""),
        "where": f"{when} {what}",
    }
    redis.Redis.from_url(os.environ["CHAOS_LEDGER"]).rpush(DEATHS, json.dumps(told))
    os.kill(os.getpid(), signal.SIGKILL)


def step(when: str, what: str) -> None:
    """A step of the application's own, to its database."""
    if "CHAOS_DEATHS" in os.environ:
        _pass("statement", when, what)


def install() -> None:
    """Have this process, and those that it forks, die some time."""
    broker = urlsplit(os.environ["CHAOS_BROKER"]).port
    attempt = Database._attempt
    send, read = AbstractConnection.send_packed_command, AbstractConnection.read_response

    def attempted(database: Any, *args: Any) -> Any:
        _pass("statement", "before", "a statement")
        found = attempt(database, *args)
        _pass("statement", "after", "a statement")
        return found

    def sent(connection: Any, *args: Any, **kwargs: Any) -> Any:
        mine = getattr(connection, "port", None) == broker
        if mine:
            _pass("command", "before", "a command")
        return send(connection, *args, **kwargs)

    def answered(connection: Any, *args: Any, **kwargs: Any) -> Any:
        found = read(connection, *args, **kwargs)
        if getattr(connection, "port", None) == broker:
            _pass("command", "after", "a command")
        return found

    Database._attempt = attempted  # type: ignore[method-assign]
    AbstractConnection.send_packed_command = sent  # type: ignore[method-assign]
    AbstractConnection.read_response = answered  # type: ignore[method-assign]
