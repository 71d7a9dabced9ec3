"""Decides from a history whether the promises of docs/guarantees.md were kept; makes histories.

    python -m kombu_toc.verify --broker toc+redis://localhost:6379/0 --minutes 30

starts producers and consumers of queues of its own, kills and suspends the consumers and cuts
their connections, writes down what happened, deletes its queues, and prints what was kept.

A history is a list of :class:`Event`. :func:`judge` is pure: times are in the history. The second
half of this module makes a history; it uses the public center, and nothing of it writes events.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import select
import signal
import socket
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import redis

from . import ScheduleChange, ScheduleFiring, TimeoutCenter, TocError, Unique, center_for
from .client.programs import named, program

#: The environment variable with the broker, whose URL may have a password.
BROKER = "TOC_VERIFY_BROKER"

# -- the history

#: What a process does to a message. Each is *asked* before it is done, and *done* or *failed* when
#: there is an answer; a run has begun when it is asked, and has ended when it is done.
PUT, DELIVER, RUN, ACK, REJECT = "put", "deliver", "run", "ack", "reject"
CANCEL, MOVE = "cancel", "move"
ASKED, DONE, FAILED = "asked", "done", "failed"

#: A firing that a schedule has planned: it is to run as if it were put; what a broker has kept.
PLAN, LEFT = "plan", "left"

#: The last line of a process; what is done to processes and servers. KILLED and QUIT end a process,
#: SILENT is one that ended by itself and could not say for a while which runs had, STOPPED holds it
#: up, FORGOT is a failover, UNSAID a time in which ends of runs may not have been heard of, HELD
#: one in which a put may be answered before the broker has it, and STEPPED a clock that was set.
CLOSED, KILLED, QUIT, SILENT = "closed", "killed", "quit", "ended without the server"
STOPPED, FORGOT, UNSAID, HELD, STEPPED = "stopped", "forgot", "unsaid", "held", "stepped"


@dataclass(frozen=True)
class Event:
    """One line of a history.

    at: seconds, by a clock that all share who write the history
    process: writes this line. What is done to ``a`` is done to ``a/1`` as well
    what, stage: as above; id: of the message
    number: counts the lines of a process from 0, so that none is missing unseen; None: not counted
    client, server: their clocks, in seconds since the epoch; the server's was read before an act
        that is asked, and after one that is done
    queue, key, unique: of a put; root: the first message of a chain that holds its key together
    due, delay: action time, in seconds since the epoch, or from the put; of a put or a move
    answer: to a put ``kept`` and an id (nothing was added, for that is there); to a cancel or a
        move ``yes``, ``late`` or ``none``
    body: checksum; early_ack: it is acknowledged before it runs; redelivered: a run is told so
    lease: seconds that a delivery lasts if nobody renews it; since: server's clock before it; of
        what a server forgot, from when on
    target, until: of a fault: processes, or queues (``queue:slot``), and when it is over; of one
        that kills, when the signal had been sent; said: seconds after which it does not concern
        what has ended
    """

    at: float
    process: str
    what: str
    stage: str = DONE
    id: str = ""
    number: int | None = None
    client: float | None = None
    server: float | None = None
    queue: str = ""
    key: str = ""
    unique: str = ""
    root: str = ""
    due: float | None = None
    delay: float | None = None
    answer: str = ""
    body: int | None = None
    early_ack: bool = False
    redelivered: bool | None = None
    lease: float = 0.0
    since: float | None = None
    target: Sequence[str] = ()
    until: float = math.inf
    said: float = math.inf


class Limit(NamedTuple):
    """What a queue declares. rate: starts a second; serial: the messages of a key in order."""

    concurrency: int | None = None
    serial: bool = False
    rate: float | None = None
    burst: int = 1


class Rules(NamedTuple):
    """lease: seconds of a delivery. A process that stands still for more than two thirds of that
    may lose what it has: leases are renewed after a third. noted: seconds by which a line that
    says that a run has begun or ended may be late"""

    lease: float = 60.0
    limits: Mapping[str, Limit] = {}
    noted: float = 0.0


#: The promises, in the order of the table.
PROMISES = (
    "the history is whole",
    "nothing is lost",
    "nothing begins early",
    "nothing runs twice without a cause",
    "messages of a key run in order",
    "limits hold",
    "one message has a unique key",
    "what is cancelled does not run",
    "what is moved waits for its new time",
    "schedules fire at each of their times",
    "bodies are as they were sent",
    "nothing is left behind",
)
(HISTORY, LOST, EARLY, TWICE, ORDER, LIMITS, UNIQUE, *_REST) = PROMISES
CANCELLED, MOVED, SCHEDULES, BODY, EMPTY = _REST


class Broken(NamedTuple):
    """A promise that was not kept, for which message, and how."""

    promise: str
    id: str
    text: str


@dataclass
class Verdict:
    """broken: what was not kept; explained: cause of a second run -> such runs; gone: messages that
    were acknowledged early and were with a process that was killed; lateness: seconds, of what was
    put for later"""

    broken: list[Broken] = field(default_factory=list)
    explained: Counter[str] = field(default_factory=Counter)
    gone: list[str] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    #: what was done -> how often
    counted: Counter[str] = field(default_factory=Counter)

    def ids(self, promise: str) -> list[str]:
        return [one.id for one in self.broken if one.promise == promise]


# -- the judge

#: Seconds that a signal takes to arrive: meanwhile a run may begin or end.
SIGNAL = 0.05

#: Seconds by which a replica may be behind its master.
BEHIND = 1.0

#: Seconds for which a process that was held up may start what it had.
QUEUED = 2.0

#: Seconds before its time in which a message of a key may be taken, and be overtaken by none.
LOOKAHEAD = 0.02

#: Seconds around its time in which what is acknowledged early may have gone with its process.
TAKEN = (-8.0, 20.0)


class _Act:
    """What was asked, and the answer, if there is one."""

    def __init__(self, asked: Event) -> None:
        self.asked = asked
        self.answer: Event | None = None

    @property
    def done(self) -> Event | None:
        return self.answer if self.answer is not None and self.answer.stage == DONE else None

    @property
    def ended(self) -> float:
        return math.inf if self.done is None else self.done.at

    @property
    def until(self) -> float:
        """Until when it certainly went on."""
        return self.asked.at if self.done is None else self.done.at

    def answers(self, text: str) -> bool:
        return self.done is not None and self.done.answer.partition(" ")[0] == text

    @property
    def due(self) -> tuple[float, float]:
        """The action time, by the server's clock: between these two."""
        asked, done = self.asked, self.answer
        delay, due = asked.delay or 0.0, -math.inf if asked.due is None else asked.due
        before, after = asked.server, None if done is None else done.server
        # It may have been set back meanwhile.
        soonest = -math.inf if before is None else min(before, after or before) + delay
        latest = math.inf if before is None or after is None else max(before, after) + delay
        return max(soonest, due), max(latest, due)


class _Message:
    """What was done to the messages of an id, in order."""

    def __init__(self) -> None:
        self.acts: defaultdict[str, list[_Act]] = defaultdict(list)
        self.deliveries: list[Event] = []

    @property
    def puts(self) -> list[_Act]:
        return [act for act in self.acts[PUT] if not act.answers("kept")]

    @property
    def runs(self) -> list[_Act]:
        return self.acts[RUN]

    def dues(self, before: float) -> list[float]:
        """The soonest times of what was put, as it had been moved by then."""
        soonest = sorted(act.due[0] for act in self.puts if act.asked.at <= before)
        for move in self.acts[MOVE]:
            if move.answers("yes") and move.ended <= before:
                soonest = [move.due[0]]
            elif move.asked.at <= before and not (move.answers("late") or move.answers("none")):
                soonest = [min([*soonest, move.due[0]])]
        return soonest

    def waits(self, act: _Act, is_forgotten: Callable[..., bool]) -> bool:
        """Whether the message certainly waited from when an act was asked until it was answered."""
        done, others = act.done, [*self.runs, *self.acts[CANCEL], *self.acts[MOVE]]
        touched = any(one.asked.at <= act.ended for one in others if one is not act)
        if len(self.puts) != 1 or touched or done is None or done.server is None:
            return False
        put = self.puts[0].done
        was_put = put is not None and put.at < act.asked.at and not is_forgotten(put.id, put.at)
        return was_put and self.puts[0].due[0] > done.server

    @property
    def over(self) -> tuple[float, float]:
        """When the one message that there was had ended: between these two."""
        ends = [*self.acts[ACK], *(one for one in self.acts[CANCEL] if not one.answers("late"))]
        certain = [one.ended for one in ends if one.asked.what == ACK or one.answers("yes")]
        # A dead letter has no unique key, and may have it again when it is requeued.
        ends += [one for one in self.acts[REJECT] if one.done is None or one.answers("dead")]
        return min((one.asked.at for one in ends), default=math.inf), min(certain, default=math.inf)


class _Judge:
    def __init__(self, history: Iterable[Event], rules: Rules) -> None:
        self.rules, self.verdict = rules, Verdict()
        self.history = sorted(history, key=lambda event: event.at)
        self.faults = [one for one in self.history if one.target or one.what == STEPPED]
        self.forgot = [one.at for one in self.faults if one.what == FORGOT]
        self.held = [one for one in self.faults if one.what == HELD]
        self.steps = [one for one in self.faults if one.what == STEPPED]
        self.messages: defaultdict[str, _Message] = defaultdict(_Message)
        self.starts: defaultdict[str, list[Event]] = defaultdict(list)
        self.schedules = {one.id.rpartition("@")[0] for one in self.history if one.what == PLAN}

    def judge(self) -> Verdict:
        self._read()
        self._check_lines()
        for id, message in self.messages.items():
            self._judge_runs(id, message)
            self._judge_end(id, message)
            self._judge_withdrawn(id, message)
        self._judge_keys()
        self._judge_concurrency()
        self._judge_rates()
        self._judge_unique()
        self.verdict.lateness.sort()
        if not any(run.done for message in self.messages.values() for run in message.runs):
            self._break(HISTORY, "", "nothing has run")
        return self.verdict

    def _break(self, promise: str, id: str, text: str) -> None:
        if promise in (HISTORY, LOST, EARLY, TWICE) and id.rpartition("@")[0] in self.schedules:
            promise = SCHEDULES
        self.verdict.broken.append(Broken(promise, id, text))

    # -- the history itself

    def _read(self) -> None:
        asked: defaultdict[tuple[str, str, str], list[_Act]] = defaultdict(list)
        for event in self.history:
            self.verdict.counted[f"{event.what} {event.stage}"] += 1
            if event.what == PLAN:
                # Whenever it is written down, it is what was to be from the beginning.
                act = _Act(replace(event, at=-math.inf))
                act.answer = act.asked
                self.messages[event.id].acts[PUT].append(act)
            elif event.what == DELIVER:
                self.messages[event.id].deliveries.append(event)
                self.starts[event.queue].append(event)
            elif event.what == LEFT:
                self._break(EMPTY, event.id, f"{event.id} is left in the broker")
            elif event.id and event.stage == ASKED:
                self.messages[event.id].acts[event.what].append(act := _Act(event))
                asked[event.process, event.what, event.id].append(act)
                if event.what == REJECT:  # that run will not end
                    asked[event.process, RUN, event.id].clear()
            elif open := event.id and asked[event.process, event.what, event.id]:
                act = open.pop(0)
                # What was forgotten may count or not, as what was not answered.
                unsure = event.what in (ACK, CANCEL, MOVE) and self._is_forgotten(
                    event.id, event.at
                )
                act.answer = replace(event, stage=FAILED, answer="") if unsure else event
            elif event.id:
                self._break(HISTORY, event.id, f"{event.process} answers what nobody has asked")

    def _is_forgotten(self, id: str, *times: float) -> bool:
        """Whether a server may have forgotten what was done to a message at one of these times."""
        queue = next((put.asked.queue for put in self.messages[id].acts[PUT]), "")
        spans = [_span(one) for one in self.faults if one.what == FORGOT and _hits(one, queue)]
        return any(since <= at <= until for since, until in spans for at in times)

    def _check_lines(self) -> None:
        lines = defaultdict(list)
        for event in self.history:
            if event.number is not None:
                lines[event.process].append(event)
        for process, written in lines.items():
            written.sort(key=lambda line: line.number or 0)
            if [one.number for one in written] != list(range(len(written))):
                self._break(HISTORY, "", f"a line of {process} is missing")
            if any(one.what in (KILLED, QUIT) and _hits(one, process) for one in self.faults):
                continue
            if written[-1].what != CLOSED:
                self._break(HISTORY, "", f"{process} ends without its last line")
            begun = {one.id for one in written if one.what in (RUN, REJECT)}
            for id in {one.id for one in written if one.what == DELIVER} - begun:
                self._break(HISTORY, id, f"{process} was delivered it, and says no more")

    # -- one message

    def _judge_runs(self, id: str, message: _Message) -> None:
        puts, runs = message.puts, message.runs
        if runs and not puts:
            self._break(HISTORY, id, "it runs, and nobody has put it")
            return
        bodies = {put.asked.body for put in puts} - {None}
        fresh, spent = 0, set[int]()
        clocks: list[float] = []  # of the runs so far that are no second ones
        for number, run in enumerate(runs):
            begun = run.asked
            if begun.body is not None and bodies and begun.body not in bodies:
                self._break(BODY, id, "its body is another one")
            there = sum(put.asked.at <= begun.at for put in puts)
            due = message.dues(begun.at)[fresh : fresh + 1]
            # If it is not due yet, an earlier copy has come back; if none could, it is early.
            is_due = begun.server is None or not due or due[0] <= begun.server
            is_new = fresh < there and begun.redelivered is False and is_due
            causes = (
                (earlier, cause)
                for earlier in set(range(number)) - spent
                for cause in self._causes(message, runs[earlier], begun)
            )
            earlier, cause = next(causes, (number, "")) if fresh and not is_new else (number, "")
            if cause:
                spent.add(earlier)
                self.verdict.explained[cause] += 1
                if cause == QUIT and begun.redelivered is False:
                    self._break(TWICE, id, "it runs again after a cold stop, and is not told")
            elif fresh == there:
                self._break(TWICE, id, f"it runs again in {begun.process}")
            else:
                fresh += 1
            # A clock that was set back has not reached what ran before, nor what was due then.
            shown = math.inf if begun.server is None else begun.server
            before = 0 if cause else sum(clock <= shown for clock in clocks)
            self._check_time(id, message, begun, before, runs[earlier].asked.at)
            clocks += [] if cause else [shown]

    def _check_time(
        self, id: str, message: _Message, begun: Event, number: int, since: float
    ) -> None:
        """since: when that run had begun for the first time, so that it was due"""
        soonest = message.dues(begun.at)[number : number + 1]
        # Around a step that was seen later, nobody knows what the server's clock showed.
        known = (
            one.since is None or not (one.since - 1 <= begun.at and since <= one.at)
            for one in self.steps
        )
        if begun.server is None or not (soonest and all(known)) or self._held_up(begun):
            return
        if begun.server < soonest[0]:
            self._break(EARLY, id, f"it begins {soonest[0] - begun.server:.6f} s early")
        elif math.isfinite(soonest[0]) and (
            message.puts[0].asked.due or message.puts[0].asked.delay
        ):
            self.verdict.lateness.append(begun.server - soonest[0])

    def _held_up(self, begun: Event) -> bool:
        """Whether the process stood still for longer than a lease before a run: what it had may
        have been given to others, moved and cancelled meanwhile."""
        stops = (one for one in self.faults if self._is_long(one) and _hits(one, begun.process))
        return any(_went_on(one, begun) for one in stops)

    def _ends(self, fault: Event, run: _Act) -> bool:
        """Whether a run that had begun has lost its process, or its lease, by a fault; not one that
        was said to have ended before."""
        hits = _hits(fault, run.asked.process) and fault.at >= run.asked.at - SIGNAL
        fatal = hits and (fault.what in (KILLED, QUIT, SILENT) or self._is_long(fault))
        # A process that ends by itself has to end what it runs.
        unheard = run.done.at >= fault.at - fault.said if run.done else fault.what != SILENT
        return fatal and unheard

    def _is_long(self, fault: Event) -> bool:
        return fault.what == STOPPED and fault.until - fault.at > self.rules.lease * 2 / 3

    def _causes(self, message: _Message, run: _Act, again: Event) -> Iterator[str]:
        """Why a message may run again that has begun to run."""
        begun, process = run.asked, run.asked.process
        acks = [one for one in message.acts[ACK] if one.asked.process == process]
        acks = [one for one in acks if begun.at <= one.asked.at <= again.at]
        heard = min((one.ended for one in acks), default=math.inf)
        for fault in self.faults:
            acknowledged = any(one.ended < fault.at - SIGNAL for one in acks)
            if self._ends(fault, run) and fault.at <= again.at and not acknowledged:
                yield fault.what
            # The later run's process had the message, and started it when it went on.
            held_up = self._is_long(fault) and _hits(fault, again.process)
            goes_on = fault.at <= begun.at and _went_on(fault, again)
            if held_up and goes_on and not again.redelivered:
                yield "stopped, not begun"
            # Or the earlier run's process had it, and others were given it meanwhile.
            went_on = self._is_long(fault) and _hits(fault, process) and _went_on(fault, begun)
            if went_on and again.at <= min(heard, fault.until + self.rules.lease) + QUEUED:
                yield "stopped, not begun"
            if fault.what in (FORGOT, UNSAID) and fault.at <= again.at:
                since, until = _span(fault)
                taken = {one.process: one.at for one in message.deliveries if one.at <= again.at}
                times = [taken.get(one.process, one.at - QUEUED) for one in (begun, again)]
                times += [begun.at, run.until]
                meanwhile = any(since <= at <= until for at in times)
                hits = _hits(fault, process) and fault.at >= begun.at - SIGNAL
                if meanwhile and (hits or _hits(fault, message.puts[0].asked.queue)):
                    yield fault.what
        for back in message.acts[REJECT]:
            if back.asked.process == process and begun.at <= back.asked.at <= again.at:
                yield "given back"
        unheard = all(one.ended > again.at for one in acks)
        if unheard and any(one.answer and one.answer.stage == FAILED for one in acks):
            yield "its acknowledgement was not answered"
        # Others may have had it when it was acknowledged, and start it now; or this one was given
        # it first, and starts it when others have had it.
        ends = self._leases(message, begun) if again.at <= heard + QUEUED else []
        is_over = any(end <= min(heard, again.at) for end in ends)
        mine = self._leases(message, again)[-1:] if process != again.process else []
        if is_over or any(end <= again.at for end in mine):
            yield "its lease had ended"

    def _leases(self, message: _Message, begun: Event) -> list[float]:
        """When the leases that the process of a run had until then may have ended, if nobody
        renews them."""
        had = [one for one in message.deliveries if one.process == begun.process]
        spans = [
            (one.at, one.at + one.lease - ((one.server or 0.0) - (one.since or 0.0)))
            for one in had
            if one.lease and one.at <= begun.at
        ]
        if not had and self.steps:  # it is renewed, and nobody wrote down since when it was there
            spans = [(begun.at - self.rules.lease, math.inf)]
        # The server's clock may have been set forward while it lasted.
        return [
            min([end, *(max(at, step.since or 0) for step in self.steps if step.at >= at)])
            for at, end in spans
        ]

    def _judge_end(self, id: str, message: _Message) -> None:
        promised = [put for put in message.puts if put.done is not None]
        ends = sum(run.done is not None for run in message.runs)
        withdrawn = any(one.done is None or one.answers("yes") for one in message.acts[CANCEL])
        if ends >= len(promised) or withdrawn:
            return
        if promised[0].asked.early_ack and self._is_gone(message):
            self.verdict.gone.append(id)
        else:
            self._break(LOST, id, f"it was put {len(promised)} times, and has ended {ends} times")

    def _is_gone(self, message: _Message) -> bool:
        last = message.runs[-1] if message.runs else None
        if last is not None and last.done is None:
            return any(self._ends(fault, last) for fault in self.faults)
        put = message.puts[-1].asked
        due = max(put.at + (put.delay or 0.0), put.due or 0.0)
        kills = (one.at - due for one in self.faults if one.what in (KILLED, QUIT))
        return any(TAKEN[0] <= seconds <= TAKEN[1] for seconds in kills)

    def _judge_withdrawn(self, id: str, message: _Message) -> None:
        for what, promise in ((CANCEL, CANCELLED), (MOVE, MOVED)):
            for act in message.acts[what]:
                if act.answers("none") and message.waits(act, self._is_forgotten):
                    self._break(promise, id, f"it waited, and a {what} did not find it")
                if act.answers("yes") and message.over[1] < act.asked.at and what == MOVE:
                    self._break(promise, id, f"it had ended before the {what}")
        for cancel in message.acts[CANCEL] if len(message.puts) == 1 else ():
            for run in message.runs if cancel.answers("yes") else ():
                causes = self._causes(message, run, cancel.done or cancel.asked)
                came_back = run.asked.at <= cancel.ended and any(causes)
                if not (came_back or self._held_up(run.asked)):
                    self._break(CANCELLED, id, "it was cancelled in time, and has begun")

    # -- keys and limits

    def _of_queues(self) -> Iterator[tuple[str, Limit, dict[str, _Message]]]:
        by_queue: defaultdict[str, dict[str, _Message]] = defaultdict(dict)
        for id, message in self.messages.items():
            if message.puts:
                by_queue[message.puts[0].asked.queue.partition(":")[0]][id] = message
        for queue, limit in self.rules.limits.items():
            yield queue, limit, by_queue[queue]

    def _judge_keys(self) -> None:
        if self.forgot:
            return  # what comes first may have been forgotten
        by_key: defaultdict[tuple[str, str], list[tuple[float, _Act, str]]] = defaultdict(list)
        for queue, limit, messages in self._of_queues():
            for id, message in messages.items():
                put, moved = message.puts[0], message.acts[MOVE] or message.acts[CANCEL]
                is_one = put.done and len(message.puts) == 1 and not (moved or put.asked.root)
                if limit.serial and is_one and put.asked.key and message.runs:
                    by_key[queue, put.asked.key].append((message.runs[0].asked.at, put, id))
        steps = self.steps
        for runs in by_key.values():
            runs.sort(key=lambda run: run[0])
            soonest = math.inf
            for number, (begun, put, id) in reversed(list(enumerate(runs))):
                for _, other, late in runs[number + 1 :] if soonest < put.due[0] else ():
                    # It may have been taken before the clock was set, and have come back.
                    is_same = all(
                        begun < (one.since or 0) or one.at < put.asked.at for one in steps
                    )
                    if self._there(other) < put.due[0] and other.ended < begun and is_same:
                        self._break(ORDER, id, f"it begins before {late}")
                        break
                soonest = min(soonest, self._there(put))

    def _there(self, put: _Act) -> float:
        """When a message was there and due, at the latest, by the server's clock, so that none that
        is due later may be taken before it."""
        held = (one for one in self.held if one.at <= put.ended and put.asked.at <= one.until)
        if put.done is None or any(_hits(one, put.asked.queue) for one in held):
            return math.inf
        return LOOKAHEAD + max(put.due[1], put.done.server or 0.0)

    def _spells(self, message: _Message) -> list[tuple[float, float, bool, str]]:
        """When the runs of a message held their places for certain, and whether until they had
        ended."""
        found = []
        for run in message.runs:
            begun, end = run.asked, run.until
            given = [one.at for one in message.deliveries if one.process == begun.process]
            since = max((at for at in given if at <= begun.at), default=begun.at)
            lost = [one.at for one in self.faults if self._ends(one, run)]
            lost += [at for at in self.forgot if at >= begun.at - BEHIND]
            whole = run.done is not None and min(lost, default=end) >= end
            ends = [end, *lost, *self._leases(message, begun)[-1:]]
            # Two servers may have been masters: each counts what it has started.
            if not (self._held_up(begun) or self._is_forgotten(begun.id, since, begun.at)):
                found.append((since, min(ends), whole, begun.id))
        return found

    def _judge_concurrency(self) -> None:
        for queue, limit, messages in self._of_queues():
            chains: defaultdict[tuple[str, str], list[_Message]] = defaultdict(list)
            for id, message in messages.items():
                asked = message.puts[0].asked
                chains[asked.key if limit.serial else queue, asked.root or id].append(message)
            places: defaultdict[str, list[tuple[float, float, bool, str]]] = defaultdict(list)
            for (place, _), chain in chains.items():
                spells = sorted(spell for one in chain for spell in self._spells(one))
                whole = all(spell[2] for spell in spells) and len(spells) == len(chain) > 1
                if limit.serial and whole and not self.forgot:
                    # Until the last of them has ended, the chain holds its key.
                    spells = [(spells[0][0], spells[-1][1], True, spells[0][3])]
                places[place] += spells
            most = 1 if limit.serial else limit.concurrency or math.inf
            for place, spells in places.items():
                running: list[float] = []
                for begun, ended, _, id in sorted(spells) if place else ():
                    running = [end for end in running if end > begun]
                    if len(running) >= most:
                        self._break(LIMITS, id, f"{most} of {place} were running when it began")
                    running.append(ended - self.rules.noted)

    def _judge_rates(self) -> None:
        if self.steps or self.forgot:
            return  # the server's clock says nothing of how long it was, or starts were forgotten
        for queue, limit in self.rules.limits.items():
            known = (one for one in self.starts[queue] if None not in (one.since, one.server))
            starts = sorted((one.since or 0.0, one.server or 0.0, one.id) for one in known)
            latest = list(accumulate((end for _, end, _ in starts), max))
            size = limit.burst + 1 if limit.rate else len(starts) + 1
            while size <= len(starts):
                for (since, _, id), until in zip(starts, latest[size - 1 :], strict=False):
                    if size > limit.burst + (limit.rate or 0.0) * (until - since) + 1e-6:
                        self._break(LIMITS, id, f"{size} began within {until - since:.3f} s")
                        return
                size *= 2

    def _judge_unique(self) -> None:
        by_key: defaultdict[str, list[tuple[_Act, str]]] = defaultdict(list)
        for id, message in self.messages.items():
            for put in message.acts[PUT]:
                if put.asked.unique and put.done and not self._is_forgotten(id, put.ended):
                    by_key[put.asked.unique].append((put, id))
        for puts in by_key.values():
            puts.sort(key=lambda one: one[0].asked.at)
            for put, id in puts:
                kept = self.messages[put.done.answer.partition(" ")[2] if put.done else ""]
                ended = not kept.puts or kept.over[1] < put.asked.at
                if put.answers("kept") and ended:
                    self._break(UNIQUE, id, "it was refused for a message that had ended")
            added = [one for one in puts if not one[0].answers("kept")]
            for (before, first), (put, id) in pairwise(added):
                if before.ended <= put.asked.at and put.ended <= self.messages[first].over[0]:
                    self._break(UNIQUE, id, f"it was added beside {first}")


def _hits(fault: Event, name: str) -> bool:
    """Whether a fault is of a process or of the one it belongs to, or of a queue or of its slot."""
    targets = fault.target
    return any(f"{name}/".startswith(f"{one}/") or one.startswith(f"{name}:") for one in targets)


def _went_on(fault: Event, begun: Event) -> bool:
    """Whether a run begins when its process goes on, which is written down a little later."""
    return -SIGNAL <= begun.at - fault.until <= QUEUED


def _span(fault: Event) -> tuple[float, float]:
    """From when to when a server may have done what it forgot."""
    return fault.at - BEHIND if fault.since is None else fault.since, fault.until


def judge(history: Iterable[Event], rules: Rules) -> Verdict:
    """Decide for each promise. Pure: a history that is judged again has the same verdict."""
    return _Judge(history, rules).judge()


# -- the run

#: Seconds of a lease, and between two faults.
LEASE, GAP = 5.0, (1.0, 3.0)

#: Seconds that a slow one runs: longer than its lease.
LONG = 6.0

#: Seconds for which dead letters are kept: longer than a clock is set forward.
DEAD_AGE = 1e9

#: What the queues of a run declare. `unique`, `plain` and `slow` declare no limit.
QUEUES: Mapping[str, Limit] = {
    "plain": Limit(),
    "keyed": Limit(serial=True),
    "few": Limit(concurrency=2),
    "rated": Limit(rate=20.0),
    "unique": Limit(),
    "slow": Limit(),
}
#: How often each of them is put into.
SHARES = (8, 4, 4, 3, 3, 0.8)

#: Schedules of a run, and seconds between their firings.
SCHEDULED, PERIOD = ("plain", "keyed"), 0.5

PRODUCERS, KEYS = 2, 3

#: What each consumer loops over; without anything it pops from all queues.
_UNRATED = ("plain", "keyed", "few", "unique")
LOOPS: Sequence[Sequence[str]] = (_UNRATED, (), _UNRATED, (), ("slow",))

#: Acts a second of a producer; seconds that consumers have for what is left, and to end.
PACE, PATIENCE, LAST_WORDS = 15.0, 60.0, 20.0

#: Options of a URL that a run has its own of, or none.
_OWN = r"(toc_prefix|global_keyprefix|client_name|toc_library\w*)=[^&]*&?"

_ERRORS = (redis.RedisError, OSError, TocError)


class Place(NamedTuple):
    """Where a process of a run is to work, and until when, by the monotonic clock.

    name: of its connections, and of its keys after the prefix
    """

    url: str
    prefix: str
    name: str
    folder: str
    until: float

    def center(self) -> TimeoutCenter:
        return center_for(self.url, toc_prefix=self.prefix, client_name=self.name)


class Lines:
    """Writes the events of one process into a file; a line is in it when `write` returns, and stays
    there if the process is killed."""

    def __init__(self, place: Place, process: str, client: Any = None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(os.path.join(place.folder, process), flags, 0o600)
        self._process, self._number, self._client = process, 0, client

    def write(self, what: str, stage: str = DONE, id: str = "", **details: Any) -> None:
        told: dict[str, Any] = {"what": what, "stage": stage, "id": id, "process": self._process}
        told |= {"at": time.monotonic(), "number": self._number, "client": time.time()}
        told |= {name: value for name, value in details.items() if value is not None}
        os.write(self._file, (json.dumps(told) + "\n").encode())
        self._number += 1

    def clock(self, choose: Callable[[list[float]], float]) -> float | None:
        """The server's clock; of the clocks of a Cluster the one that is chosen."""
        try:
            times = [one.time() for one in _servers(self._client)]
            return choose([seconds + us / 1e6 for seconds, us in times])
        except _ERRORS:
            return None

    def attempt(self, what: str, id: str, act: Callable[[], Any], **asked: Any) -> bool:
        """Do an act, and write down what was asked and the answer (what is told of it, if that is a
        text); whether there was one."""
        self.write(what, ASKED, id, server=self.clock(min), **asked)
        try:
            answer = act()
        except _ERRORS as exc:
            self.write(what, FAILED, id, answer=f"{type(exc).__name__}: {exc}"[:200])
            return False
        told = answer if isinstance(answer, str) else None
        self.write(what, DONE, id, server=self.clock(max), answer=told)
        return True


def _servers(client: Any) -> list[Any]:
    nodes = client.get_primaries() if hasattr(client, "get_primaries") else []
    return [client.get_redis_connection(node) for node in nodes] or [client]


def _begin() -> Callable[[], bool]:
    """A child ends when it is told to by SIGTERM; Ctrl-C is for its parent. Returns whether it is
    to go on."""
    told: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    parent = os.getppid()
    return lambda: not told and os.getppid() == parent


def _produce(place: Place, process: str) -> None:
    goes_on = _begin()
    center, lose_reply = place.center(), _losing_replies()
    lines, dice = Lines(place, process, center.client), random.Random(process + place.name)
    numbers, waiting = count(), list[tuple[str, str]]()
    while goes_on() and time.monotonic() < place.until:
        time.sleep(dice.uniform(0.5, 1.5) / PACE)  # the pace that was asked for
        if waiting and dice.random() < 0.3:  # often the latest: it may just be delivered
            which = dice.choice((-1, dice.randrange(len(waiting))))
            _withdraw(center, lines, dice, *waiting.pop(which))
            continue
        queue = dice.choices(list(QUEUES), SHARES)[0]
        # Handlers put again what is called so; what is put once is put twice.
        kind = dice.choice((".again", ".once", "", "", "")) if queue == "plain" else ""
        number = 1 if queue == "slow" else dice.choice((1, 1, 1, 6))
        for id in [f"{process}.{next(numbers)}{kind}" for _ in range(number)]:
            if dice.random() < 0.15:
                lose_reply()
            for _ in range(2 if kind == ".once" else 1):
                _put(center, lines, dice, id, queue)
        if queue in ("plain", "few", "slow") and kind != ".again":
            waiting = [*waiting[-20:], (id, queue)]
    lines.write(CLOSED)


def _losing_replies() -> Callable[[], None]:
    """Returns what makes the reply to the next request be lost: the server has done it, and the
    connection ends. Not with TLS."""
    send, wanted = socket.socket.sendall, list[bool]()

    def sendall(self: socket.socket, *data: Any) -> None:
        send(self, *data)
        if wanted:
            wanted.clear()
            if select.select([self], [], [], 1.0)[0]:
                self.recv(1 << 16)
            self.shutdown(socket.SHUT_RDWR)

    socket.socket.sendall = sendall  # type: ignore[method-assign, assignment]
    return lambda: wanted.append(True)


def _put(center: TimeoutCenter, lines: Lines, dice: Any, id: str, queue: str) -> None:
    body = dice.randbytes(dice.randrange(300))
    how: dict[str, Any] = {"delay": dice.choice((0.0, 0.0, dice.uniform(0, 5)))}
    unique = f"unique-{dice.randrange(KEYS)}" if queue == "unique" else ""
    if unique:
        how["unique"] = Unique(unique)
    if id.endswith(".once"):  # it is there when it is put again
        unique, how = id, {"delay": dice.uniform(3, 5), "if_exists": "keep"}
    elif queue == "plain" and dice.random() < 0.3:
        how = {"at": time.time() + dice.uniform(-5, 5)}
    if queue in ("keyed", "few"):
        how["key"] = f"key-{dice.randrange(KEYS)}"

    def put() -> str:
        made = center.put(queue, id, body, **how)
        return f"kept {made.id}" if made.outcome == "kept" else ""

    asked = {"due": how.get("at"), "delay": how.get("delay"), "key": how.get("key", "")}
    checksum = zlib.crc32(body)
    lines.attempt(PUT, id, put, body=checksum, queue=queue, unique=unique, **asked)


def _withdraw(center: TimeoutCenter, lines: Lines, dice: Any, id: str, queue: str) -> None:
    """Cancel a message or give it another time; it may be running, or be gone."""
    delay, cancel = dice.uniform(0, 4), partial(center.cancel, id, topic=queue)
    if dice.random() < 0.5:
        lines.attempt(CANCEL, id, lambda: _in_time(one.deleted for one in cancel()))
        return
    move = partial(center.reschedule, id, topic=queue, delay=delay)
    lines.attempt(MOVE, id, lambda: _in_time(one.moved for one in move()), delay=delay)


def _in_time(found: Iterable[bool]) -> str:
    return next(("yes" if one else "late" for one in found), "none")


def _schedule(center: TimeoutCenter, queue: str, last_us: int, now_us: int, next_us: int) -> None:
    """Have the queue's schedule fire next at that time, if its latest firing is now's (0: none)."""
    record, wanted = (f"{queue}@{us}\n{last_us}" if us else "" for us in (now_us, next_us))
    firing = ScheduleFiring(f"{queue}@{next_us}", b"%d" % last_us, next_us)
    is_over = next_us > last_us
    change = ScheduleChange(queue, record, "" if is_over else wanted, None if is_over else next_us)
    center.recurring.change(queue, change._replace(put=None if is_over else firing))


def _consume(place: Place, process: str, queues: Sequence[str]) -> None:
    goes_on = _begin()
    center = place.center()
    lines = Lines(place, process, center.client)
    handler = _Handler(center, lines, random.Random(process + place.name), bool(queues))
    while goes_on():
        with contextlib.suppress(*_ERRORS):  # the broker is away, or the connection was cut
            if queues:
                _loop(center, handler, goes_on, queues)
            else:
                _pop(center, handler)
    lines.write(CLOSED)


def _loop(
    center: TimeoutCenter, handler: _Handler, goes_on: Callable[[], bool], queues: Sequence[str]
) -> None:
    """Handle messages whose leases are renewed for as long as it takes. None waits behind one that
    takes long."""
    limit = 1 if "slow" in queues else 2
    with center.consume(*queues, limit=limit, idle=1.0, auto_ack=False) as messages:
        for message in messages:
            if not message.lost:
                handler.handle(message, handler.lines.clock(max))
            if not goes_on():
                break


def _pop(center: TimeoutCenter, handler: _Handler) -> None:
    """Handle what a pop gives; nobody renews its leases."""
    lines = handler.lines
    since = lines.clock(min)
    popped = center.pop(list(QUEUES), 3, wait=handler.dice.choice((0.0, 0.5)), visibility=LEASE)
    server = lines.clock(max)
    for one in popped.messages:
        told = {"lease": LEASE, "since": since, "server": server, "queue": one.topic}
        lines.write(DELIVER, DONE, _name(one), **told)
    for one in popped.messages:
        handler.handle(one, server)


def _name(message: Any) -> str:
    """The id that a message was put under; another live one may have it."""
    return str(message.id.partition("#")[0])


@dataclass
class _Handler:
    """Does the work of a message."""

    center: TimeoutCenter
    lines: Lines
    dice: random.Random
    renews: bool
    #: the firing before
    fired: tuple[str, int, int] | None = None

    def handle(self, message: Any, server: Any) -> None:
        id, dice, lines = _name(message), self.dice, self.lines
        if "@" in id:
            self._follow(message)
        lines.write(RUN, ASKED, id, body=zlib.crc32(message.body), server=server)
        is_long = self.renews and message.topic == "slow"
        brief = 0.05 if message.topic in ("keyed", "few") else dice.choice((0, 0, 0.01, 0.05))
        time.sleep(LONG if is_long else brief)  # the work
        if dice.random() < 0.05:
            reject = partial(self.center.reject, message, reason="not this time")
            ways: list[Callable[[], Any]] = [partial(self.center.release, message)]
            ways += [partial(reject, requeue=requeue) for requeue in (True, False)]
            lines.attempt(REJECT, id, dice.choice(ways))
            return
        lines.write(RUN, DONE, id)
        again = id.endswith(".again") and dice.choice(("", "before", "after"))
        if again == "before":
            self._put_again(message)
        self._ack(message)
        if again == "after":
            self._put_again(message, visibility=LEASE)
            self._ack(message)  # as who was not answered

    def _ack(self, message: Any) -> None:
        # However late it is, an acknowledgement counts.
        while not self.lines.attempt(ACK, _name(message), partial(self.center.ack, message)):
            time.sleep(0.1)

    def _put_again(self, message: Any, **traits: Any) -> None:
        """A message of the same id and bytes."""
        put = partial(
            self.center.put, message.topic, _name(message), message.body, delay=1.0, **traits
        )
        asked = {"body": zlib.crc32(message.body), "queue": message.topic, "delay": 1.0}
        self.lines.attempt(PUT, _name(message), lambda: put() and None, **asked)

    def _follow(self, message: Any) -> None:
        """Put the firing after this one; and once more the one after an earlier one."""
        now = int(message.id.rpartition("@")[2])
        this = message.topic, int(message.body), now
        for queue, last, at in filter(None, (self.fired, this)):
            do = partial(_schedule, self.center, queue, last, at, at + int(PERIOD * 1e6))
            while not self.lines.attempt("follow", f"{queue}@{at}", do):
                time.sleep(0.1)
        self.fired = this


class _Run:
    """Starts the processes, breaks what may be broken, and reads the history."""

    def __init__(self, place: Place) -> None:
        self._place, self._dice = place, random.Random(place.name)
        self._center = place.center()
        self._lines = Lines(place, "controller", self._center.client)
        #: when the server's clock was asked, and by how much it was ahead of this host's
        self._shown: tuple[float, float] | None = None
        self._numbers = count()
        #: the name and the process of each
        self._consumers: dict[int, tuple[str, Any]] = {}
        self._producers: list[Any] = []
        for queue, limit in QUEUES.items():
            terms: dict[str, Any] = {"key_order": "serial"} if limit.serial else {}
            terms |= {"concurrency": limit.concurrency, "rate": limit.rate}
            terms |= {"visibility": LEASE, "dead_age": DEAD_AGE}
            self._center.queues.declare(queue, **terms)

    def run(self) -> None:
        self._note_step()
        self._schedule()
        self._producers = [self._start(_produce, f"producer-{n}") for n in range(PRODUCERS)]
        while time.monotonic() < self._place.until:
            self._keep_consumers()
            time.sleep(self._dice.uniform(*GAP))
            self._break()
            self._note_step()
            self._requeue()
        for producer in self._producers:
            producer.join(LAST_WORDS)
        self._drain()
        for queue in QUEUES:
            for one in self._center.scan(queue).messages:
                self._lines.write(LEFT, id=one.id, answer=f"{one.state} {one.reason}")
        self._lines.write(CLOSED)

    def _schedule(self) -> None:
        """Begin the schedules; they end with the faults."""
        firings = max(int((self._place.until - time.monotonic()) / PERIOD), 1)
        for queue in SCHEDULED:
            begin, period = int((self._lines.clock(max) or 0.0) * 1e6), int(PERIOD * 1e6)
            times = [begin + period * number for number in range(1, firings + 1)]
            _schedule(self._center, queue, times[-1], 0, times[0])
            for at in times:
                self._lines.write(PLAN, id=f"{queue}@{at}", due=at / 1e6, queue=queue)

    def _start(self, target: Callable[..., None], process: str, *more: Any) -> Any:
        context = multiprocessing.get_context("fork")  # there are no threads
        started = context.Process(target=target, args=(self._place, process, *more), daemon=True)
        # Python ignores an exception of what is called around a fork, also that of Ctrl-C.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        started.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return started

    def _keep_consumers(self) -> None:
        for number in range(len(LOOPS)):
            if number not in self._consumers or not self._consumers[number][1].is_alive():
                name = f"consumer-{next(self._numbers)}"
                self._consumers[number] = name, self._start(_consume, name, LOOPS[number])

    def _break(self) -> None:
        name, process = self._dice.choice(list(self._consumers.values()))
        pid, hit = process.pid, (name,)
        what = self._dice.choice((KILLED, STOPPED, STOPPED, "cut"))
        at = time.monotonic()
        if what == KILLED:
            os.kill(pid, signal.SIGKILL)
            self._lines.write(KILLED, at=time.monotonic(), target=hit)
            process.join()
        elif what == STOPPED:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._dice.choice((0.5, LEASE + 1.5)))
            os.kill(pid, signal.SIGCONT)
            self._lines.write(STOPPED, at=at, target=hit, until=time.monotonic())
        else:
            self._cut()

    def _cut(self) -> None:
        """End connections of the run's own; who may not do that leaves it."""
        with contextlib.suppress(*_ERRORS):
            for server in _servers(self._center.client):
                for one in server.client_list():
                    if one["name"] == self._place.name and self._dice.random() < 0.7:
                        server.client_kill_filter(_id=one["id"])
        self._lines.write("cut")

    def _note_step(self) -> None:
        """Write down that the server's clock was set, if it was since this was asked last."""
        now, shown = time.monotonic(), self._lines.clock(max)
        ahead = None if shown is None else shown - now
        if ahead is not None and self._shown is not None and abs(ahead - self._shown[1]) > 0.5:
            self._lines.write(STEPPED, since=self._shown[0])
        self._shown = self._shown if ahead is None else (now, ahead)

    def _requeue(self) -> None:
        """Have delivered again what was rejected."""
        with contextlib.suppress(*_ERRORS):
            for queue in QUEUES:
                self._center.dead.requeue(queue)

    def _drain(self) -> None:
        until, is_empty = time.monotonic() + PATIENCE, False
        while time.monotonic() < until and not is_empty:
            self._keep_consumers()
            self._requeue()
            time.sleep(0.2)  # nobody tells when a queue is empty
            # A handler may be about to put again what it has acknowledged.
            if is_empty := self._is_empty():
                self._end_consumers()
                is_empty = self._is_empty()
        self._end_consumers()

    def _is_empty(self) -> bool:
        with contextlib.suppress(*_ERRORS):
            return not any(sum(self._center.queues.counts(queue)) for queue in QUEUES)
        return False

    def _end_consumers(self) -> None:
        for _, consumer in self._consumers.values():
            consumer.terminate()
        for _, consumer in self._consumers.values():
            consumer.join(LAST_WORDS)

    def clear(self) -> None:
        """End what runs, and delete every key of the run."""
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        until = time.monotonic() + PATIENCE
        while True:
            try:
                client, pattern = self._center.client, f"{self._place.prefix}*"
                # Again until there is none: the last request of one that was killed may come late.
                while keys := list(client.scan_iter(pattern, count=1000)):
                    for key in keys:
                        client.unlink(key)
                return
            except _ERRORS:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)  # until the broker is back


def read(folder: str) -> list[Event]:
    """The history that the files of a folder have."""
    lines = "".join(file.read_text() for file in Path(folder).iterdir()).splitlines()
    return [Event(**json.loads(line)) for line in lines]


def table(verdict: Verdict) -> str:
    """What was done, and for each promise how often it was broken."""
    counted = verdict.counted
    rows = [(name, str(number)) for name, number in sorted(counted.items())]
    rows += [(f"runs again: {name}", str(number)) for name, number in verdict.explained.items()]
    late = verdict.lateness or [0.0]
    shown = [f"{late[len(late) * percent // 100] * 1000:.1f}" for percent in (50, 99)]
    rows.append(("late p50, p99 (ms)", ", ".join(shown)))
    broken = Counter(one.promise for one in verdict.broken)
    tried = [one for one in PROMISES if one != SCHEDULES or counted[f"{PLAN} {DONE}"]]
    rows += [(one, f"BROKEN {broken[one]}" if broken[one] else "kept") for one in tried]
    lines = [f"{name:<52} {value:>12}" for name, value in rows]
    return "\n".join([*lines, *(" ".join(one) for one in verdict.broken[:50])])


def _verify(broker: str, minutes: float, history: str | None) -> int:
    """Make a history and judge it; returns the exit code."""
    with tempfile.TemporaryDirectory() as temporary:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # Keys of its own; a task library that the URL names is left alone.
        name, until = f"verify-{os.urandom(6).hex()}", time.monotonic() + 60 * minutes
        folder = os.path.join(history or temporary, name)
        os.makedirs(folder)
        prefix = f"{center_for(broker).keys.prefix}{name}:"
        try:
            run = _Run(Place(re.sub(_OWN, "", broker), prefix, name, folder, until))
        except redis.RedisError as exc:
            raise ConnectionError(str(exc)) from exc
        try:
            run.run()
        except KeyboardInterrupt:
            print("interrupted: nothing is judged, and nothing is left in the broker")
            return 130
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            run.clear()
        verdict = judge(read(folder), Rules(LEASE, QUEUES))
    print(table(verdict))
    return 1 if verdict.broken else 0


@program("python -m kombu_toc.verify", BROKER)
@click.option(
    "--minutes", type=float, default=5.0, show_default=True, help="How long faults go on."
)
@click.option("--history", metavar="FOLDER", help="Where the history is to stay.")
def main(broker: str | None, minutes: float, history: str | None) -> None:
    """Put and consume under faults, in queues of its own, and judge what happened."""
    sys.exit(_verify(named(broker, BROKER), minutes, history))


if __name__ == "__main__":
    main()
