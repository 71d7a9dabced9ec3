"""The notifier: fetches what is due of topics with a target, and sends it there."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import partial, reduce
from math import inf
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
from redis.exceptions import RedisError

from ..aio.center import AsyncTimeoutCenter
from ..center.runner import BROKEN
from ..client.programs import check_installed, one_line, raise_file_limit
from ..errors import ConfigurationError, EnvelopeError, TocError
from ..model.delivery import origin_in
from ..model.results import DEAD, Delivery, Popped
from . import targets
from .message import COMPRESSED, SECRETS, SecretsFile, content_of, headers_of, host_of, normal

logger = logging.getLogger(__name__)

#: Seconds for a request, unless given; how many may be under way to one target; and how long a
#: message waits after its first failure if its topic does not say.
TIMEOUT = 15.0
CONCURRENCY = 100
BACKOFF = 5.0

#: How many may be under way to all targets. Each has its share, of no less than so many.
MOST_UNDER_WAY = 2000
LEAST_SHARE = 4

#: Seconds between two looks at the declarations of topics, and at the secrets: less than the five
#: after which a topic that was deleted would be declared again by who still pops it.
REREAD = 3.0

#: Seconds for which one pop waits, at most.
SPELL = 20.0

#: Seconds by which messages of a queue with a rate are fetched before they may be sent.
AHEAD = 0.05

#: What tells a message from all others: topic, id, the slot of its birth, its birth.
Origin: TypeAlias = tuple[str, str, int, str]

#: Pops that wait at a time: each has a connection to the broker.
MAX_GROUPS = 50

#: Seconds until the next attempt, if the broker cannot be used.
PAUSE = 1.0


def check_needs() -> None:
    """Raises ConfigurationError, naming the extra, if what it needs is not installed."""
    check_installed("the notifier", "notify", "greenlet", "aiohttp")


class Notifier:
    """Sends messages to the targets of their topics. It belongs to one event loop.

    center: the center whose messages these are
    secrets: those that sign what is sent; None: nothing is signed
    allow: networks and addresses that may be connected to although they are not public
    timeout: seconds for a request
    concurrency: how many requests of one topic may be under way, from this process
    backoff: seconds that a message waits after its first failure, doubled with each further one,
        if neither its topic nor the connection says so

    Raises ConfigurationError for what makes no sense, and if the package aiohttp is not installed.
    """

    def __init__(
        self,
        center: AsyncTimeoutCenter,
        secrets: SecretsFile | None,
        *,
        allow: Iterable[str] = (),
        timeout: float = TIMEOUT,
        concurrency: int = CONCURRENCY,
        backoff: float = BACKOFF,
    ) -> None:
        check_needs()
        from .posting import Poster

        for name, said, least, most, unit in (
            ("timeout", timeout, 0.1, 3600, " seconds"),
            ("concurrency", concurrency, 1, MOST_UNDER_WAY, ""),
            ("backoff", backoff, 0, 86_400, " seconds"),
        ):
            if not least <= said <= most:
                raise ConfigurationError(f"{name} must be from {least} to {most}{unit}, not {said}")
        if secrets is not None and not secrets.secrets:
            raise ConfigurationError(
                "there are no secrets, so nothing could be signed: make one by "
                "'python -m kombu_toc.notify --new-secret URL', put its line into a file, and name "
                "that with --secrets; or give --unsigned"
            )
        self._center = center
        self._secrets = secrets
        self._concurrency = concurrency
        self._backoff = backoff
        patience = 2 * timeout + 2
        #: seconds of a lease, unless it is renewed
        self.lease = min(patience, targets.LEASE)
        addresses = targets.Addresses(allow)
        self._make_poster = partial(Poster, addresses, timeout)
        self._poster: Any = None
        self._settler = targets.Settler(center, patience)
        self._keeper = targets.Keeper(center, self.lease)
        self._presence = targets.Presence(center)
        self._lanes: dict[str, targets.Lane] = {}
        self._groups: list[_Group] = []
        #: what is under way, or was taken while it was not sure who has it
        self._deliveries: dict[Origin, asyncio.Task[bool]] = {}
        #: whether it could not read which topics have targets
        self._blind = False
        #: targets without a secret that the log has a line of
        self._unsigned: set[tuple[str, str]] = set()

    async def run(self, until: asyncio.Event) -> None:
        """Send what is due until that is set. Then what is under way ends first."""
        async with self._make_poster() as self._poster:
            stopped = asyncio.ensure_future(until.wait())
            keeping = asyncio.create_task(self._keeper.run())
            try:
                while not until.is_set():
                    await self._look()
                    await asyncio.wait({stopped}, timeout=REREAD)
            finally:
                stopped.cancel()
                await self._regroup({})
                while left := {one for one in self._deliveries.values() if not one.done()}:
                    await asyncio.wait(left)
                keeping.cancel()
                await self._presence.tell(())

    # -- which topics there are

    async def _look(self) -> None:
        """Read which topics have targets, and the secrets."""
        if self._secrets is not None:
            try:
                if self._secrets.refresh():
                    self._unsigned.clear()
            except (ConfigurationError, OSError) as exc:
                logger.error("the secrets stay as they were: %s", exc)
        try:
            found = await self._center.call(targets.read_targets)
        except Exception as exc:
            if not self._blind:
                logger.warning("cannot read which queues have targets: %s", exc)
            self._blind = True
            return
        self._blind = False
        wanted = {name: one for name, one in found.items() if self._may_send(name, one.url)}
        await self._regroup(wanted)
        await self._presence.tell(self._lanes)

    def _may_send(self, queue: str, target: str) -> bool:
        """Whether this process has what it needs for a target."""
        if self._secrets is None or self._secrets.secrets.of(target) is not None:
            return True
        if (queue, target) not in self._unsigned:
            self._unsigned.add((queue, target))
            logger.error(
                "queue %s: there is no secret for its target %s, so nothing is sent there: add a "
                "line to the secrets",
                *(one_line(queue), targets.shown(target)),
            )
        return False

    async def _regroup(self, wanted: dict[str, targets.Target]) -> None:
        """Fetch for these topics, and for no others."""
        lanes = self._lanes
        for name, lane in list(lanes.items()):
            if lane.closed or name not in wanted or wanted[name].url != lane.target:
                lane.close()
                del lanes[name]
        share = max(MOST_UNDER_WAY // max(len(wanted), 1), LEAST_SHARE)
        for name, target in wanted.items():
            if name not in lanes:
                lanes[name] = targets.Lane(name, target.url, 0)
            lane = lanes[name]
            lane.limit = min(self._concurrency, share)
            lane.terms = target
        every = list(lanes.values())
        parts = [part for number in range(MAX_GROUPS) if (part := every[number::MAX_GROUPS])]
        kept = [group for group in self._groups if group.lanes in parts]
        ended = {group.task for group in self._groups if group not in kept}
        for task in ended:
            task.cancel()
        if ended:
            await asyncio.wait(ended)
        running = [group.lanes for group in kept]
        self._groups = kept + [_Group(self, part) for part in parts if part not in running]

    # -- one message

    def start(self, popped: Popped, lanes: dict[str, targets.Lane]) -> None:
        """Send messages that were fetched."""
        now = asyncio.get_running_loop().time()
        for message in popped.messages:
            lane = lanes[message.topic]
            lane.begin(now, len(message.body))
            ahead = max(message.start_us, message.action_us) - popped.now_us
            origin = (message.topic, message.id, *origin_in(message.birth, message.slot))
            earlier = self._deliveries.get(origin)
            task = asyncio.create_task(self._handle(lane, message, max(ahead, 0) / 1e6, earlier))
            self._deliveries[origin] = task
            task.add_done_callback(partial(self._ended, origin))

    def _ended(self, origin: Origin, task: asyncio.Task[bool]) -> None:
        # While it is unsure, it may have been fetched again before it was acknowledged.
        keeps = self._keeper.unsure_for if self._keeper.is_unsure() and _has_taken(task) else 0.0
        asyncio.get_running_loop().call_later(keeps, self._forget, origin, task)

    def _forget(self, origin: Origin, task: asyncio.Task[bool]) -> None:
        if self._deliveries.get(origin) is task:
            del self._deliveries[origin]

    async def _handle(
        self,
        lane: targets.Lane,
        message: Delivery,
        ahead: float,
        earlier: asyncio.Task[bool] | None,
    ) -> bool:
        """Send a message, and settle it; whether its target has taken it.

        ahead: seconds until it may start
        earlier: a delivery of the same message, whose lease has ended while it was sent
        """
        self._keeper.hold(message)
        try:
            if earlier is not None:
                await asyncio.wait({earlier})
                if _has_taken(earlier):
                    await self._settler.ack(message)
                    return True
            if ahead:
                await asyncio.sleep(ahead)
            if lane.terms.spacing and (left := lane.turn(asyncio.get_running_loop().time())):
                await asyncio.sleep(left)
            host = host_of(message)
            async with lane.hosts.visit(host, lane.limit) if host else nullcontext():
                if not lane.wants(asyncio.get_running_loop().time()):  # any more
                    await self._settler.release(message)
                elif await self._keeper.has(message):
                    return await self._attempt(lane, message)
            return False
        finally:
            self._keeper.drop(message)
            lane.end(len(message.body))

    async def _attempt(self, lane: targets.Lane, message: Delivery) -> bool:
        try:
            verdict, target = await self._send(lane, message)
        except Exception as exc:
            names = one_line(message.id), one_line(message.topic)
            logger.exception("message %s of %s cannot be sent", *names)
            error = f"{type(exc).__name__}: {exc}"
            verdict, target = targets.Verdict(targets.AGAIN, "cannot be sent", error), lane.target
        if verdict.what == targets.DONE:
            lane.worked()
            await self._settler.ack(message)
        elif verdict.what == targets.GONE and target == lane.target:
            await self._stop(lane, verdict)
            await self._settler.release(message)
        else:
            await self._reject(lane, message, verdict, target)
        return verdict.what == targets.DONE

    async def _send(self, lane: targets.Lane, message: Delivery) -> tuple[targets.Verdict, str]:
        """Send a message once; what becomes of it, and where it was sent to."""
        is_compressed = message.body.startswith(COMPRESSED)
        async with lane.expanding() if is_compressed else nullcontext() as tell:
            try:
                content = content_of(message)
            except (ConfigurationError, EnvelopeError) as exc:
                return targets.Verdict(targets.GONE, "it cannot be sent", str(exc)), ""
            if tell is not None:
                tell(len(content.body))
            target = content.target or lane.target
            # What is compared with the secrets and what is sent are one and the same.
            url = normal(target)
            keys: Sequence[bytes] | None = ()
            if self._secrets is not None:
                keys = self._secrets.secrets.of(url)
            if keys is None:
                why = f"there is no secret for its target {targets.shown(target)}"
                return targets.Verdict(
                    targets.AGAIN, "there is no secret for its target", why
                ), target
            headers = headers_of(message, content, keys, int(time.time()))
            answer = await self._poster.post(url, headers, content.body)
            return targets.judge(answer, target, datetime.now(timezone.utc)), target

    async def _stop(self, lane: targets.Lane, verdict: targets.Verdict) -> None:
        """The target of a topic wants nothing any more."""
        lane.close()
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            stopped = await self._center.call(
                targets.stop_target, lane.queue, lane.target, f"{verdict.reason} at {at}"
            )
        except (RedisError, *BROKEN, TocError) as exc:
            name = one_line(lane.queue)
            logger.warning("queue %s: its target cannot be stopped: %s", name, exc)
            return
        if stopped:
            logger.error(
                "queue %s: its target %s has answered 410 Gone and is stopped: its messages wait; "
                "'celery toc topic set %s --target URL' goes on",
                *(one_line(lane.queue), targets.shown(lane.target), one_line(lane.queue)),
            )

    async def _reject(
        self, lane: targets.Lane, message: Delivery, verdict: targets.Verdict, target: str
    ) -> None:
        now = asyncio.get_running_loop().time()
        if verdict.rest and target == lane.target:
            lane.rest(now + verdict.rest)
        backoff = verdict.backoff
        if backoff is None and not lane.terms.retry_backoff:
            longest = lane.terms.retry_backoff_max
            backoff = targets.backoff_of(message.failures, self._backoff, longest)
        state = await self._settler.reject(
            message,
            requeue=verdict.what != targets.GONE,
            reason=verdict.reason,
            error=verdict.error,
            backoff=backoff,
        )
        lane.failed(verdict.error, now, dead=state == DEAD)

    # -- for groups

    async def pop(self, queues: list[str], limit: int) -> Popped:
        """Wait for messages of these topics."""
        return await self._center.pop(queues, limit, wait=SPELL, visibility=self.lease, ahead=AHEAD)


def _has_taken(task: asyncio.Task[bool]) -> bool:
    """Whether a delivery has ended, and its target has taken the message."""
    return task.done() and not task.cancelled() and task.exception() is None and task.result()


class _Group:
    """Lanes that are fetched for together, by one pop that waits."""

    def __init__(self, notifier: Notifier, lanes: list[targets.Lane]) -> None:
        self.lanes = lanes
        self._notifier = notifier
        self._loop = asyncio.get_running_loop()
        self._bell: asyncio.Future[None] = self._loop.create_future()
        for lane in lanes:
            lane.on_room = self._ring
        self.task = asyncio.create_task(self._run())

    def _ring(self) -> None:
        if not self._bell.done():
            self._bell.set_result(None)

    async def _run(self) -> None:
        while True:
            try:
                await self._fetch()
            except Exception as exc:
                names = one_line(", ".join(lane.queue for lane in self.lanes[:5]))
                logger.warning("cannot fetch messages of %s for now: %s", names, exc)
                await asyncio.sleep(PAUSE)

    async def _fetch(self) -> None:
        """Fetch once for the lanes that have room; return when others have."""
        now = self._loop.time()
        if self._bell.done():
            self._bell = self._loop.create_future()
        ready = {lane.queue: lane for lane in self.lanes if lane.ready_at() <= now}
        for lane in self.lanes:
            lane.left_out = lane.queue not in ready
        if not ready:
            await self._others(ready)
            return
        limit = min(lane.room for lane in ready.values())
        pop = asyncio.create_task(self._notifier.pop(list(ready), limit))
        others = asyncio.create_task(self._others(ready))
        try:
            await asyncio.wait({pop, others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            others.cancel()
            if pop.cancel():
                await asyncio.wait({pop})
            # If it has ended, nothing is awaited: whoever ends this group may do so twice.
            if not pop.cancelled() and pop.exception() is None:
                self._notifier.start(pop.result(), ready)
        if not pop.cancelled():
            pop.result()

    async def _others(self, ready: dict[str, targets.Lane]) -> None:
        """Wait until a lane that is not among these can be fetched for, or one of these must not
        be any more."""
        others = [lane for lane in self.lanes if lane.queue not in ready]
        while True:
            now = self._loop.time()
            left = min((lane.ready_at() for lane in others), default=inf) - now
            if left <= 0 or not all(lane.wants(now) for lane in ready.values()):
                return
            # Nothing is awaited between this and the bell: it cannot have rung meanwhile.
            await asyncio.wait({self._bell}, timeout=None if left == inf else left)
            if self._bell.done():
                self._bell = self._loop.create_future()


# -- runs a notifier until the process is told to end


F = TypeVar("F", bound=Callable[..., Any])


def notifier_options(function: F) -> F:
    """Give a command of click the options of :func:`notify`."""

    def number(name: str, default: float, help: str) -> Callable[[F], F]:
        return click.option(name, type=type(default), default=default, show_default=True, help=help)

    options = (
        click.option(
            "--secrets",
            metavar="FILE",
            help=f"The secrets of targets; or the environment variable {SECRETS}.",
        ),
        click.option("--unsigned", is_flag=True, help="Sign nothing."),
        click.option(
            "--allow",
            multiple=True,
            metavar="NETWORK",
            help="What may be sent to although it is not public, as 10.1.0.0/16 or, at one port, "
            "10.1.0.7:8080; may be repeated.",
        ),
        number("--timeout", TIMEOUT, "Seconds for a request."),
        number("--concurrency", CONCURRENCY, "Requests under way of one queue."),
        number(
            "--backoff",
            BACKOFF,
            "Seconds that a message waits after its first failure, if its queue does not say.",
        ),
    )
    return reduce(lambda made, option: option(made), reversed(options), function)


def notify(
    open_center: Callable[[], AsyncTimeoutCenter],
    *,
    secrets: str | Path | None = None,
    unsigned: bool = False,
    say: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Send what is due until SIGINT or SIGTERM; what is under way then ends first.

    open_center: makes the center, in the event loop
    secrets: a file with the secrets of targets; None: the environment variable TOC_NOTIFY_SECRETS
    unsigned: sign nothing instead
    say: is told that it has begun
    options: those of :class:`.notifier.Notifier`

    Raises ConfigurationError for what makes no sense, OSError if the secrets cannot be read.
    """
    kept = None if unsigned else SecretsFile(secrets)
    raise_file_limit()

    async def run() -> None:
        async with open_center() as center:
            notifier = Notifier(center, kept, **options)
            until = asyncio.Event()
            loop = asyncio.get_running_loop()
            for one in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(one, _end, loop, until)
            if unsigned:
                say("Nothing is signed: a target cannot tell who has sent what it gets.")
            say("Sending what is due of queues that have a target.")
            await notifier.run(until)

    asyncio.run(run())


def _end(loop: asyncio.AbstractEventLoop, until: asyncio.Event) -> None:
    """The first signal ends it in order; the next one at once."""
    until.set()
    for one in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(one)


def beside(
    secrets: str | Path | None, **options: Any
) -> Callable[[AsyncTimeoutCenter], Callable[[asyncio.Event], Any]]:
    """A notifier inside a server of the HTTP API: for the argument ``beside`` of
    :func:`kombu_toc.http.api_for`.

    secrets, options: as those of :func:`notify`

    Raises OSError if the secrets cannot be read; the application raises ConfigurationError for what
    makes no sense.
    """
    kept = SecretsFile(secrets)
    return lambda center: Notifier(center, kept, **options).run
