"""Tells others which queues a notifier sends: it is among the consumers of these."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Iterable
from math import inf

from redis.exceptions import RedisError

from ..aio.center import AsyncTimeoutCenter
from ..center.calls import announce_presence
from ..center.runner import BROKEN
from ..consumer.holdings import PRESENCE_INTERVAL, PRESENCE_MS
from ..errors import TocError

logger = logging.getLogger(__name__)


class Presence:
    """What a notifier has told of itself."""

    def __init__(self, center: AsyncTimeoutCenter) -> None:
        self._center = center
        self._told = ""
        self._due = -inf

    async def tell(self, queues: Iterable[str]) -> None:
        """It sends these just now; nothing is done if that was told a moment ago."""
        now = asyncio.get_running_loop().time()
        names = sorted(queues)
        statement = json.dumps([socket.gethostname(), os.getpid(), *names]) if names else ""
        if statement == self._told and (not statement or now < self._due):
            return
        before = [self._told] if self._told not in ("", statement) else []
        keys = self._center.keys
        try:
            await self._center.run(announce_presence(keys, statement, before, PRESENCE_MS))
        except (RedisError, *BROKEN, TocError) as exc:
            logger.debug("nobody is told what is sent here: %s", exc)
            return
        self._told, self._due = statement, now + PRESENCE_INTERVAL
