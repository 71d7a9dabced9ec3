"""Renews the leases of what is under way: so they may be short, and what a killed process had comes
back soon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from math import inf

from ..aio.center import AsyncTimeoutCenter
from ..model.results import Delivery

logger = logging.getLogger(__name__)

#: Seconds of a lease, unless requests are so short that it may be shorter.
LEASE = 15.0

#: How often leases are renewed while they last.
TIMES = 5


class Keeper:
    """Renews leases. It belongs to one event loop.

    lease: their seconds
    """

    def __init__(self, center: AsyncTimeoutCenter, lease: float) -> None:
        self._center = center
        self._lease = lease
        #: what is under way, by its identity: since the latest beat, and for longer
        self._new: dict[int, Delivery] = {}
        self._old: dict[int, Delivery] = {}
        self._beat_at = inf
        #: until when what is fetched may have been fetched before this process stood still
        self._unsure_until = -inf
        self._failing = False

    def hold(self, message: Delivery) -> None:
        """Renew its lease from now on."""
        self._new[id(message)] = message

    def drop(self, message: Delivery) -> None:
        """Renew it no more."""
        if self._new.pop(id(message), None) is None:
            self._old.pop(id(message), None)

    async def run(self) -> None:
        """Renew leases until it is cancelled."""
        loop = asyncio.get_running_loop()
        self._beat_at = loop.time()
        while True:
            await asyncio.sleep(self._lease / TIMES)
            if self.is_unsure():
                self._old.update(self._new)  # what is new may be as old as the others
            old = list(self._old.values())
            self._old.update(self._new)
            self._new.clear()
            if old:
                await self._renew(old)
            self._notice(loop.time())
            self._beat_at = loop.time()

    def _notice(self, now: float) -> None:
        """If the process stood still, a lease may have ended that it takes for a new one."""
        if now - self._beat_at > self._lease / 2:
            self._unsure_until = now + self.unsure_for

    def is_unsure(self) -> bool:
        """Whether leases may have ended, because the process stood still not long ago."""
        now = asyncio.get_running_loop().time()
        self._notice(now)
        return now < self._unsure_until

    @property
    def unsure_for(self) -> float:
        """Seconds for which it is unsure, after it stood still."""
        return self._lease / TIMES

    async def has(self, message: Delivery) -> bool:
        """Whether a message that was just fetched may be sent: not if another process has it."""
        return not self.is_unsure() or await self._renew([message])

    async def _renew(self, messages: Sequence[Delivery]) -> bool:
        """Renew these leases; whether it is known that none had ended."""
        try:
            lost = await self._center.extend(messages, self._lease)
        except Exception as exc:  # whatever it is, the next beat may renew them
            if not self._failing:
                logger.warning("cannot renew the leases of what is sent just now: %s", exc)
            self._failing = True
            return False
        self._failing = False
        return not lost
