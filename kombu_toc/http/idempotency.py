"""``Idempotency-Key``: a POST that is repeated gets the answer that it got before.

An entry in Redis is first a claim, which says that somebody is at it, and then the answer. A
claim of a process that died ends by itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from ..aio.center import AsyncTimeoutCenter
from ..aio.client import AwaitedPart
from .fields import CONTENT_TYPE, Problem, invalid, retry_after
from .request import Answer, Request

logger = logging.getLogger(__name__)

#: Characters of a key, at most.
MAX_KEY = 255

#: Seconds for which a claim lasts: longer than any request. Who has claimed a key reads and writes
#: it only so long after asking for it: a little less, since a call takes a moment.
CLAIM = 120
HELD = CLAIM - 20.0

#: Statuses of answers that are not kept: the same request may get another one.
_PASSING = (401, 403, 408, 413, 429)

#: Claims that are remembered because Redis was away, at most.
MOST_LEFT = 10_000

REPLAYED = (b"idempotency-replayed", b"true")


class _Claim(NamedTuple):
    """What this process is at.

    name: of its key in Redis
    asked: tells the request from others
    until: until when nobody else can have claimed it, by the monotonic clock
    owner: tells this claim from others
    """

    name: str
    asked: str
    until: float
    owner: str

    @property
    def holds(self) -> bool:
        return time.monotonic() < self.until


class Idempotency:
    """Keeps answers.

    seconds: for how long, at most
    """

    def __init__(self, center: AsyncTimeoutCenter, seconds: float) -> None:
        self._center, self._redis = center, AwaitedPart(center.center.client)
        self._seconds = seconds
        #: claims that may be in Redis although nobody is at it, because it was away: name -> owner
        self._left: dict[str, str] = {}

    async def run(
        self, key: str, request: Request, path: str, run: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Do what is asked for, unless it was done under this key: then what was answered.

        Raises Problem if the key was used for something else, or if that is being done just now.
        """
        if not 0 < len(key) <= MAX_KEY or not key.isascii() or not key.isprintable():
            raise invalid(
                "idempotency-key", f"it must have 1 to {MAX_KEY} characters of printable ASCII"
            )
        claim = _Claim(
            self._center.center.keys.answer(_hash(request.token.name, key)),
            _fingerprint(request, path),
            time.monotonic() + HELD,
            secrets.token_hex(8),
        )
        if (found := await self._take(claim)) is not None:
            return _again(found, claim.asked)
        try:
            made = await run()
        except Problem as problem:
            await self._keep(claim, as_answer(problem))
            raise
        except BaseException:
            await self._drop(claim)
            raise
        await self._keep(claim, made)
        if made.undo is not None:
            made = made._replace(undo=partial(self._forget, claim, made.undo))
        return made

    async def _take(self, claim: _Claim) -> dict[str, Any] | None:
        """Claim a key; what is there instead. Raises Problem if there is nothing to be had."""
        text = json.dumps({"asked": claim.asked, "owner": claim.owner})
        try:
            for _ in range(2):
                if await self._redis.set(claim.name, text, nx=True, ex=CLAIM):
                    return None
                found = await self._redis.get(claim.name)
                if found is None:
                    continue  # what was there has ended this very moment
                entry: dict[str, Any] = json.loads(found)
                if entry.get("owner") == claim.owner:
                    return None  # the reply was lost, and the call repeated
                if not self._is_left(claim, entry):
                    return entry
                if await self._redis.set(claim.name, text, xx=True, ex=CLAIM):
                    return None
        except (RedisError, OSError):
            self._leave(claim)  # it may be there all the same
            raise
        raise _busy()

    def _leave(self, claim: _Claim) -> None:
        """Nobody is at it any more, and Redis cannot be told."""
        if len(self._left) >= MOST_LEFT:
            self._left.clear()
        self._left[claim.name] = claim.owner

    def _is_left(self, claim: _Claim, entry: dict[str, Any]) -> bool:
        """Whether this process has left what is there, a request for the same. One may go on."""
        if entry["asked"] != claim.asked or entry.get("owner") != self._left.get(claim.name, ""):
            return False
        del self._left[claim.name]
        return True

    async def _keep(self, claim: _Claim, made: Answer) -> None:
        """Keep an answer. If that fails, what was done is answered all the same."""
        if made.status >= 500 or made.status in _PASSING:
            await self._drop(claim)
            return
        if not claim.holds:
            return  # somebody else may be at it
        entry = {
            "asked": claim.asked,
            "status": made.status,
            "type": made.content_type.decode(),
            "headers": [[one.decode("latin-1") for one in pair] for pair in made.headers],
            "body": b64encode(made.body if made.kept is None else made.kept).decode(),
        }
        seconds = max(1, int(min(self._seconds, made.keep)))
        try:
            await self._redis.set(claim.name, json.dumps(entry), ex=seconds)
        except (RedisError, OSError) as exc:
            logger.warning("an answer is not kept under its Idempotency-Key: %s", exc)

    async def _forget(self, claim: _Claim, undo: Callable[[], Awaitable[Any]]) -> None:
        """Undo what nobody got the answer to. A repetition does it anew: what the answer says is
        true no more."""
        await self._drop(claim)
        await undo()

    async def _drop(self, claim: _Claim) -> None:
        try:
            if claim.holds:
                await self._redis.delete(claim.name)
        except (RedisError, OSError):
            self._leave(claim)


def as_answer(problem: Problem) -> Answer:
    return Answer(problem.body(), problem.status, CONTENT_TYPE, headers=problem.headers)


def _again(entry: dict[str, Any], asked: str) -> Answer:
    if entry["asked"] != asked:
        raise Problem(
            "key-reused",
            "this Idempotency-Key was used for another request; use a new one for each request, "
            "and the same only to repeat it",
            "idempotency-key",
        )
    if "body" not in entry:
        raise _busy()
    headers = [(a.encode("latin-1"), b.encode("latin-1")) for a, b in entry["headers"]]
    return Answer(
        b64decode(entry["body"]),
        entry["status"],
        entry["type"].encode(),
        headers=(*headers, REPLAYED),
    )


def _busy() -> Problem:
    return Problem(
        "conflict",
        "a request with this Idempotency-Key is being dealt with; repeat it in a moment",
        "idempotency-key",
        retry_after(1),
    )


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogateescape")).hexdigest()


def _fingerprint(request: Request, path: str) -> str:
    """Tells a request from another one."""
    digest = hashlib.sha256(request.body)
    events = sorted(
        (name.decode("latin-1"), said.decode("latin-1"))
        for name, said in request.headers.items()
        if name.startswith(b"ce-") or name == b"content-type"
    )
    query = sorted(request.query.items())
    digest.update(json.dumps([request.method, path, query, events]).encode())
    return digest.hexdigest()
