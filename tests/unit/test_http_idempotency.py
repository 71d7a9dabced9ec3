"""Answers under an Idempotency-Key, when the server that keeps them fails or is slow."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from redis.exceptions import ConnectionError

from kombu_toc.http import Answer, Problem, Request, app
from kombu_toc.http.app import CLAIM, Idempotency
from kombu_toc.http.tokens import NOBODY


class Center:
    """Keeps strings; a call may fail once, before or after it has done what it is to do."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.center = SimpleNamespace(keys=SimpleNamespace(answer=str), client=self)
        self.fails: dict[str, int] = {}
        self.get, self.expire = self.kept.get, self.seconds.__setitem__
        self.pttl = lambda name: self.seconds.get(name, 0) * 1000

    def set(self, name: str, text: str, *, nx: bool = False, xx: bool = False, ex: float) -> bool:
        kind = "claim" if nx else "keep"
        if nx and self.fails.pop("late", 0):
            self.kept[name] = text  # it stood still, and does it when nobody waits any more
            raise ConnectionError("no reply")
        if xx and name not in self.kept:
            return False
        if self.fails.pop(kind, 0):
            raise ConnectionError("it is gone")
        if nx and name in self.kept:
            return False
        self.kept[name], self.seconds[name] = text, ex
        if self.fails.pop("reply", 0):
            return self.set(name, text, nx=nx, ex=ex)  # the client repeats it
        return True

    def delete(self, name: str) -> None:
        if self.fails.pop("delete", 0):
            raise ConnectionError("it is gone")
        self.kept.pop(name, None)


def request(path: str = "p") -> Request:
    made = Request({"method": "POST", "headers": []}, None, [])  # type: ignore[arg-type]
    made.token, made.path, made.headers = NOBODY, path, {b"idempotency-key": b"k"}
    return made


class Work:
    done = 0

    async def __call__(self) -> Answer:
        self.done += 1
        return Answer(b"%d" % self.done)


async def test_what_was_done_is_answered_although_the_answer_cannot_be_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    center, work = Center(), Work()
    center.fails["keep"] = 1
    made = await Idempotency(center, 60).run(request(), work)  # type: ignore[arg-type]
    assert (made.body, work.done) == (b"1", 1)
    assert "not kept under its Idempotency-Key" in caplog.text
    with pytest.raises(Problem) as caught:  # nobody knows any more; it ends by itself
        await Idempotency(center, 60).run(request(), work)  # type: ignore[arg-type]
    assert (caught.value.status, work.done) == (409, 1)


async def test_if_a_key_cannot_be_claimed_nothing_is_done() -> None:
    center, work = Center(), Work()
    center.fails["claim"] = 1
    with pytest.raises(ConnectionError):
        await Idempotency(center, 60).run(request(), work)  # type: ignore[arg-type]
    assert work.done == 0


@pytest.mark.parametrize("how", ["late", "delete"])
async def test_what_failed_because_the_broker_was_away_may_be_repeated_at_once(how: str) -> None:
    """A claim that nobody is at would refuse a repetition for two minutes, or for as long as the
    server's clock is set back."""
    center, work = Center(), Work()
    center.fails[how] = 1
    kept = Idempotency(center, 60)  # type: ignore[arg-type]

    async def fail() -> Answer:
        raise ConnectionError("no reply")

    with pytest.raises(ConnectionError):
        await kept.run(request(), fail)
    assert len(center.kept) == 1
    center.seconds.update(dict.fromkeys(center.kept, CLAIM + 30 * 86400))
    for other, path, status in ((kept, "q", 422), (Idempotency(center, 60), "p", 409)):  # type: ignore[arg-type]
        with pytest.raises(Problem) as caught:
            await other.run(request(path), work)
        assert caught.value.status == status
    assert list(center.seconds.values()) == [CLAIM]

    async def again() -> Answer:
        with pytest.raises(Problem) as caught:  # one goes on, and no other
            await kept.run(request(), work)
        assert caught.value.status == 409
        return await work()

    assert (await kept.run(request(), again)).body == b"1"
    repeated = await kept.run(request(), work)
    assert (repeated.body, work.done) == (b"1", 1)


async def test_a_claim_whose_reply_was_lost_is_ones_own() -> None:
    center, work = Center(), Work()
    center.fails["reply"] = 1
    made = await Idempotency(center, 60).run(request(), work)  # type: ignore[arg-type]
    assert (made.body, made.headers) == (b"1", ())
    [kept] = center.kept.values()
    assert "body" in json.loads(kept)


@pytest.mark.parametrize("fails", [False, True])
async def test_who_took_longer_than_a_claim_lasts_touches_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    center, now = Center(), time.monotonic()
    monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda: now))

    async def slow() -> Answer:
        nonlocal now
        now += CLAIM + 1
        [name] = center.kept
        center.kept[name] = "another one's"
        if fails:
            raise ValueError
        return Answer(b"late")

    with pytest.raises(ValueError) if fails else nullcontext():
        made = await Idempotency(center, 60).run(request(), slow)  # type: ignore[arg-type]
        assert made.body == b"late"
    assert list(center.kept.values()) == ["another one's"]
