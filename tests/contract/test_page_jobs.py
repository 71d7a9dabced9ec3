"""The page: what is done to all that match."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from celery import Celery

from celery_toc import timeout_center
from kombu_toc import FailureBounds, TimeoutCenter
from kombu_toc.aio.center import AsyncTimeoutCenter
from kombu_toc.http import Mask, PageExtras, Problem
from kombu_toc.http.page import jobs as marks
from kombu_toc.http.page.jobs import Actions, Job, Jobs, Selection, find
from kombu_toc.http.page.presentation import Reader
from kombu_toc.http.tokens import Audit

from ..support.cluster import Cluster
from ..support.http_server import HttpServer
from ..support.inspection import put_some
from ..support.page_visitor import Visitor, audit, wait_for
from ..support.servers import Server
from ..support.waiting import wait_until
from .test_failures import failure


@pytest.mark.cluster
def test_with_two_processes_each_shows_and_stops_what_the_other_does(
    server: Server | Cluster, local: Visitor, center: TimeoutCenter
) -> None:
    put_many(center, 50)
    job = local.post("all", queue="mail", act="cancel", text="{}").headers["location"]
    with HttpServer(server.toc_url) as made:
        other = Visitor(made)
        assert "Cancel 50" in wait_for(other, job, "50 messages match")
        tell(other, job)
        wait_for(local, job, "Done: 50 messages cancelled")
        tell(local, job)  # once
        again = local.post("all", queue="mail", act="cancel").headers["location"]
        wait_for(other, again, "0 messages match")
        tell(other, again, "stop")
        wait_for(local, again, "stopped")
    assert [entry[1:] for entry in audit(center)] == [
        ["cancel all", "mail", "begins: waiting messages in mail with '{}' in their arguments", 50],
        ["cancel all", "mail", "ends: waiting messages in mail with '{}' in their arguments", 50],
    ]


def test_what_is_cancelled_of_schedules_is_said(server: Server | Cluster, local: Visitor) -> None:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as app:
        schedules = timeout_center(app).schedules
        schedules.put("nightly", "shop.clean", 3600.0, queue="mail")
        local.center.put("mail", "you@home", b"{}", delay=3600)  # no schedule's
        job = begin(local, "2 messages match")
        tell(local, job)
        text = wait_for(local, job, "Done: 2 messages cancelled.")
        assert "The next firing of 'nightly' was among them; it goes on" in text
        schedules.delete("nightly")


def test_a_job_whose_process_is_gone_is_told_as_lost(local: Visitor, center: TimeoutCenter) -> None:
    center.put("mail", "order-7", b'{"a": 1}', delay=3600)
    job = begin(local, "1 message matches.", text="a")
    key = center.keys.job(job.partition("id=")[2])
    said = json.loads(center.client.hget(key, "job"))
    said[5] = "running"
    center.client.hset(key, "run", json.dumps(said))
    assert "Its process is gone" not in local.get(job).body.decode()
    center.client.expire(key, 3600 - 60)  # as if it was written a minute ago, by Redis's clock
    wait_for(local, job, "Its process is gone")


class Held:
    """A center for asyncio whose scans and look-ups wait for somebody, beginning with the second
    one."""

    def __init__(self, center: AsyncTimeoutCenter) -> None:
        self._center = center
        self.calls = 0
        self.waits = asyncio.Event()
        self.go_on = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._center, name)

    async def _held(self) -> None:
        self.calls += 1
        if self.calls > 1:
            self.waits.set()
            await self.go_on.wait()

    async def scan(self, *args: Any, **options: Any) -> Any:
        await self._held()
        return await self._center.scan(*args, **options)

    async def get(self, *args: Any, **options: Any) -> Any:
        await self._held()
        return await self._center.get(*args, **options)


def jobs_of(center: Any) -> Jobs:
    extras = PageExtras()
    return Jobs(center, Reader(Mask(), extras), Actions(center, extras), Audit(center))


Test = Callable[[Any, Jobs, Jobs], Coroutine[Any, Any, None]]


@pytest.fixture
def run_jobs(server: Server | Cluster, center: TimeoutCenter) -> Callable[[Test], None]:
    """Run a test with the jobs of two processes, of which the first is held."""

    async def run(test: Test) -> None:
        async with AsyncExitStack() as stack:
            one, other = (AsyncTimeoutCenter.from_url(server.toc_url) for _ in range(2))
            held = Held(one)
            first, second = jobs_of(held), jobs_of(other)
            for used in (other, one, second, first):
                stack.push_async_callback(used.aclose)
            stack.callback(held.go_on.set)
            await test(held, first, second)

    return lambda test: asyncio.run(run(test))


def put_many(center: TimeoutCenter, number: int, first: int = 0) -> None:
    numbers = range(first, first + number)
    center.put_many("mail", [{"id": f"m-{n}", "body": b"{}", "delay": 3600 + n} for n in numbers])


async def counted(jobs: Jobs, act: str, selection: Selection, at: float | None = None) -> Job:
    """Begin a job, and wait until all that match are counted."""
    id = (await jobs.begin(act, selection, "anna", at)).id
    while (job := await jobs.get(id)).phase == "counting":
        await asyncio.sleep(0.01)
    return job


async def over(jobs: Jobs, id: str) -> Job:
    while not (job := await jobs.get(id)).is_over:
        await asyncio.sleep(0.01)
    return job


async def carried_out(jobs: Jobs, job: Job) -> Job:
    """Confirm it, and wait until it is over."""
    await jobs.confirm(job.id, "anna")
    return await over(jobs, job.id)


def begin(visitor: Visitor, matches: str, act: str = "cancel", **fields: Any) -> str:
    """Ask for it on the page, which says how many match: where the job is shown."""
    job = visitor.post("all", queue="mail", act=act, **fields).headers["location"]
    wait_for(visitor, job, matches)
    return job


def tell(visitor: Visitor, job: str, what: str = "go") -> None:
    assert visitor.post("job", id=job.partition("id=")[2], do=what).status == 303


def test_what_is_still_counted_cannot_be_confirmed(run_jobs: Any, center: TimeoutCenter) -> None:
    put_many(center, 1_200)

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        job = await first.begin("cancel", Selection("mail", text="{}"), "anna", None)
        await held.waits.wait()
        with pytest.raises(Problem, match="wait until it is known how many") as raised:
            await second.confirm(job.id, "ben")
        assert raised.value.kind == "conflict"
        held.go_on.set()
        while first.busy:
            await asyncio.sleep(0.01)
        await second.confirm(job.id, "ben")
        done = await over(second, job.id)
        assert (done.phase, done.number, done.who) == ("done", 1_200, "ben")
        assert await first.get(job.id) == done
        assert (await second.confirm(job.id, "carl")) == done  # once

    run_jobs(test)
    assert [entry[:2] for entry in audit(center)] == [["ben", "cancel all"]] * 2


class Watched:
    """A center for asyncio that knows how many bytes its pages have had."""

    def __init__(self, center: AsyncTimeoutCenter) -> None:
        self._center = center
        self.pages: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._center, name)

    async def scan(self, *args: Any, **options: Any) -> Any:
        page = await self._center.scan(*args, **options)
        self.pages.append(sum(len(one.body) for one in page.messages))
        return page

    async def get(self, *args: Any, **options: Any) -> Any:
        found = await self._center.get(*args, **options)
        self.pages.append(sum(len(one.body) for one in found))
        return found


async def test_large_messages_are_read_a_few_at_a_time(
    server: Server | Cluster, center: TimeoutCenter
) -> None:
    large, number = 3 << 20, 12
    put_some(center, "mail", number, "m-", b"x" * large, delay=3600)

    watched = Watched(AsyncTimeoutCenter.from_url(server.toc_url))
    jobs, reader = jobs_of(watched), Reader(Mask(), PageExtras())
    now_us = round(time.time() * 1e6)
    for selection in (Selection("mail"), Selection("mail", text="y")):
        await find(watched, reader, selection, now_us=now_us, limit=100, after=None)
    job = await counted(jobs, "cancel", Selection("mail", text="x"))
    assert (await carried_out(jobs, job)).number == number
    assert max(watched.pages) <= (8 << 20) + large
    await jobs.aclose()
    await watched.aclose()


async def test_a_filter_looks_at_as_many_as_it_says_however_many_bytes_they_have(
    server: Server | Cluster, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "SECONDS", 60.0)
    body = b"x" * 5_000
    center.put_many("mail", [{"id": f"m-{n}", "body": body, "delay": 3600} for n in range(1_000)])
    toc, reader = AsyncTimeoutCenter.from_url(server.toc_url), Reader(Mask(), PageExtras())
    how: dict[str, Any] = {"now_us": round(time.time() * 1e6), "limit": 100, "after": None}
    for most, looked in ((800, 800), (2_000, 1_000)):
        monkeypatch.setattr(marks, "LOOKED", most)
        found = await find(toc, reader, Selection("mail", text="y"), **how)
        assert (found.looked, found.messages, not found.after) == (looked, [], most > looked)
    await toc.aclose()


@pytest.mark.parametrize("number", [0, 700])
def test_it_is_done_to_nothing_that_was_put_later(
    run_jobs: Any, center: TimeoutCenter, number: int
) -> None:
    center.queues.declare("mail")
    if number:
        put_many(center, number)

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        job = await counted(second, "cancel", Selection("mail", text="{}"))
        put_many(center, 500, 1_000)
        before = [{"id": f"now-{n}", "body": b"{}", "delay": 60} for n in range(100)]
        center.put_many("mail", before)  # before all others
        done = await carried_out(second, job)
        assert (done.phase, done.number, done.late) == ("done", number, 0)
        kept = center.client.hkeys(center.keys.job(job.id))
        assert sorted(kept) == [b"go", b"job", b"run"]

    run_jobs(test)
    assert center.counts("mail").scheduled == 600


NAMESAKES: dict[str, dict[str, Any]] = {
    "another time": {"body": b"{}", "delay": 5000},
    "the same time": {"body": b"{1}", "at": 4_000_000_000.0},
}


@pytest.mark.cluster
@pytest.mark.parametrize("act", ["cancel", "run", "reschedule"])
def test_it_is_done_to_no_namesake_of_what_was_counted(
    run_jobs: Any, center: TimeoutCenter, act: str
) -> None:
    ids = [*NAMESAKES, "moved", "taken", "gone", *(f"m-{n}" for n in range(20))]
    put_some(center, "mail", ids, body=b"{}", at=4_000_000_000.0)

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        at = None if act != "reschedule" else 4_100_000_000.0
        job = await counted(second, act, Selection("mail"), at)
        assert job.matching == len(ids)
        for id, how in NAMESAKES.items():
            center.cancel(id, topic="mail")
            center.put("mail", id, **how)
        center.reschedule("moved", topic="mail", at=4_050_000_000.0)
        center.cancel("gone", topic="mail")
        [taken] = center.pop("mail", ids=["taken"], early=True).messages
        done = await carried_out(second, job)
        assert (done.phase, done.number, done.late) == ("done", 20, 0)
        times = {one.id: one.time_us // 1_000_000 for one in center.get(ids, topic="mail")}
        assert times["the same time"] == 4_000_000_000 and times["moved"] == 4_050_000_000
        assert times["another time"] < 4_000_000_000
        assert not center.extend(taken) and "gone" not in times
        others = {times.get(f"m-{n}") for n in range(20)}
        if act == "run":
            assert max(others) <= time.time() + 60
        else:
            assert others == {None if act == "cancel" else 4_100_000_000}

    run_jobs(test)


@pytest.mark.cluster
@pytest.mark.parametrize("act", ["requeue", "purge"])
def test_of_dead_letters_it_is_done_to_no_namesake_of_what_was_counted(
    run_jobs: Any, center: TimeoutCenter, act: str
) -> None:
    def die(ids: list[str]) -> None:
        center.put_many("mail", [{"id": id, "body": b"{}"} for id in ids])
        for one in center.pop("mail", ids=ids).messages:
            center.reject(one, requeue=False, error="OSError: no route")

    ids = [f"m-{n}" for n in range(20)]
    die(ids)

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        job = await counted(second, act, Selection("mail", "dead", error="OSError: no route"))
        center.dead.purge("mail", ids=["m-7"])
        die(["m-7", "m-20"])
        done = await carried_out(second, job)
        assert (done.phase, done.number, done.late) == ("done", 19, 0)

    run_jobs(test)
    dead = center.scan("mail", state="dead").messages
    assert sorted(one.id for one in dead) == ["m-20", "m-7"]
    assert center.counts("mail").ready == (19 if act == "requeue" else 0)


@pytest.mark.cluster
def test_of_very_many_that_match_it_is_done_to_the_first(
    run_jobs: Any, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "MOST", 1_100)
    put_many(center, 1_200)

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        job = await counted(second, "cancel", Selection("mail"))
        assert (job.matching, job.more) == (1_100, True)
        await second.confirm(job.id, "anna")
        done = await over(first, job.id)
        assert (done.phase, done.number, done.more) == ("done", 1_100, True)

    run_jobs(test)
    left = {one.id for one in center.scan("mail", limit=200).messages}
    assert left == {f"m-{n}" for n in range(1_100, 1_200)}


def test_the_log_says_who_has_stopped_what_another_has_begun(
    run_jobs: Any, center: TimeoutCenter, signed_in: Any
) -> None:
    put_many(center, 5)
    anna = signed_in("anna")

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        job = await counted(second, "cancel", Selection("mail", text="{}"))
        held.calls = 1  # the first one is held, too
        await first.confirm(job.id, "carl")
        await held.waits.wait()
        stopping = asyncio.to_thread(anna.post, "job", id=job.id, do="stop")
        assert (await stopping).status == 303
        held.go_on.set()
        assert (await over(second, job.id)).phase == "stopped"

    run_jobs(test)
    said = "waiting messages in mail with '{}' in their arguments"
    assert [entry for entry in audit(center) if entry[1] != "sign in"] == [
        ["carl", "cancel all", "mail", f"begins: {said}", 5],
        ["anna", "stop cancel all", "mail", said, -1],
        ["carl", "cancel all", "mail", f"is stopped: {said}", 5],
    ]


@pytest.mark.cluster
def test_all_that_match_are_counted_however_far_away_they_are(local: Visitor) -> None:
    for place, at in enumerate((1.0, time.time() + 3600, 4_102_444_800.0, 8_999_999_000.0)):
        local.center.put("mail", f"m-{place}", b"{}", at=at)
    for fields, text in (
        ({}, "4 messages match."),
        ({"until": "2200-01-01"}, "3 messages match."),
        ({"since": "2050-01-01"}, "2 messages match."),
        ({"state": "scheduled", "since": "1970-01-01 00:00:01"}, "3 messages match."),
        ({"until": "1960-01-01"}, "0 messages match."),
        ({"since": "1h30m", "until": "30m"}, "0 messages match."),
    ):
        begin(local, text, "reschedule", at="2h", **fields)
    moving = {"at": "2040-01-31", "since": "2200-01-01"}
    begun = begin(local, "1 message matches.", "reschedule", **moving)
    tell(local, begun)
    wait_for(local, begun, "Done: 1 message rescheduled.")
    span = "not before 2200-01-01 00:00:00 UTC to 2040-01-31T00:00:00.000000Z"
    assert audit(local.center)[-1][3:] == [f"ends: waiting messages in mail {span}", 1]
    begun = begin(local, "4 messages match.")
    tell(local, begun)
    wait_for(local, begun, "Done: 4 messages cancelled.")


def test_a_server_that_ends_says_how_far_its_jobs_have_come(
    run_jobs: Any, center: TimeoutCenter
) -> None:
    put_many(center, 1_200)

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        job = await counted(second, "cancel", Selection("mail"))
        await first.confirm(job.id, "anna")
        await held.waits.wait()
        ending = asyncio.create_task(first.aclose())
        await asyncio.sleep(0)
        held.go_on.set()
        await ending
        lost = await second.get(job.id)
        assert (lost.phase, lost.number) == ("lost", 1_000)

    run_jobs(test)
    assert center.counts("mail").scheduled == 200
    assert audit(center)[-1][3:] == ["ends with its server: waiting messages in mail", 1_000]


def test_who_wanted_a_job_to_stop_before_it_began_is_heard(
    run_jobs: Any, center: TimeoutCenter
) -> None:
    put_many(center, 1_200)

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        job = await first.begin("cancel", Selection("mail", text="{}"), "anna", None)
        await held.waits.wait()
        await second.stop(job.id)
        held.go_on.set()
        stopped = await over(second, job.id)
        assert (stopped.phase, stopped.number) == ("stopped", 0)
        # It was counted to its end before anybody looked whether it is to stop.
        late = await counted(second, "cancel", Selection("mail", text="{}"))
        center.client.hset(center.keys.job(late.id), "stop", "1")
        await second.confirm(late.id, "ben")
        stopped = await over(second, late.id)
        assert (stopped.phase, stopped.number) == ("stopped", 0)

    run_jobs(test)
    assert center.counts("mail").scheduled == 1_200


@pytest.mark.parametrize(
    "declared, put",
    [
        ({"key_fair": True}, [{"key": f"k{n % 3}"} for n in range(40)]),
        ({"steps": (0, 3, 6)}, [{"priority": (0, 3, 6)[n % 3]} for n in range(40)]),
        ({}, [{"basis": f"b{n}"} for n in range(40)]),
    ],
    ids=["keys", "steps", "bases"],
)
def test_what_was_counted_is_known_again_however_it_waits(
    run_jobs: Any, center: TimeoutCenter, declared: Any, put: Any
) -> None:
    """Due and not due, and what has come back from a consumer before it was counted."""
    center.queues.declare("mail", **declared)
    for n, how in enumerate(put):
        center.put("mail", f"m-{n}", b"{}", delay=3600 if n % 2 else 0, **how)
    for one in center.pop("mail", 3).messages:
        center.release([one])
    waiting = center.counts("mail").waiting

    async def test(held: Held, first: Jobs, second: Jobs) -> None:
        job = await counted(second, "reschedule", Selection("mail"), time.time() + 7200)
        assert job.matching == waiting
        done = await carried_out(second, job)
        assert (done.phase, done.number, done.late) == ("done", waiting, 0)

    run_jobs(test)
    assert center.queues.coming("mail", [7000.0, 7300.0]) == [0, 40]


# -- over HTTP


def over_http(server: HttpServer, location: str) -> Any:
    """The job when it is over."""
    found: list[Any] = []

    def is_over() -> bool:
        found[:] = [server.get(location).json]
        return found[0]["phase"] in ("done", "stopped", "failed", "lost")

    wait_until(is_over, 60)
    return found[0]


def test_a_job_is_begun_shown_listed_and_stopped_over_http(api: HttpServer) -> None:
    put_many(api.center, 1_200)
    api.center.queues.declare("news")
    path = "/v1/queues/mail/jobs"
    begun = api.ask("POST", path, {"act": "cancel"})
    assert (begun.status, begun.json["phase"]) == (202, "counting")
    location = begun.headers["location"]
    assert location == f"{path}/{begun.json['id']}"
    done = over_http(api, location)
    told = (done["phase"], done["matching"], done["number"], done["by"])
    assert told == ("done", 1_200, 1_200, "this machine")
    assert api.center.counts("mail").waiting == 0
    assert api.get(path).json["jobs"] == [done]
    assert api.get("/v1/queues/news/jobs").json["jobs"] == []
    assert api.get(f"/v1/queues/news/jobs/{done['id']}").status == 404
    # One that is over stays as it is.
    assert api.ask("POST", f"{location}:stop").json == done
    at = "2030-01-31T09:30:00.000000Z"
    api.center.put("mail", "one", b"{}", delay=3600)
    moved = api.ask("POST", path, {"act": "reschedule", "time": at, "state": "scheduled"})
    assert over_http(api, moved.headers["location"])["number"] == 1
    [one] = api.center.get("one")
    assert one.time_us == 1_896_082_200_000_000
    for wrong in (
        {"act": "reschedule"},
        {"act": "cancel", "time": at},
        {"act": "cancel", "state": "dead"},
        {"act": "cancel", "exception": "OSError"},
        {"act": "retry", "text": "x"},
        {"act": "none"},
    ):
        assert api.ask("POST", path, wrong).status == 422, wrong
    assert api.ask("POST", "/v1/queues/nobody/jobs", {"act": "cancel"}).status == 404
    said = [entry[1:3] for entry in audit(api.center)]
    assert said.count(["cancel all", "mail"]) == 2


@pytest.mark.cluster
def test_all_failed_tasks_that_match_are_retried_by_a_job_over_http(api: HttpServer) -> None:
    api.center.queues.declare("mail")
    many = [failure(f"t{n}", exception="OSError") for n in range(250)]
    more = [failure("other"), failure("lost", exception="OSError", message=b"")]
    assert all(api.center.failures.keep([*many, *more], FailureBounds()))
    begun = api.ask("POST", "/v1/queues/mail/jobs", {"act": "retry", "exception": "OSError"})
    done = over_http(api, begun.headers["location"])
    told = [done[name] for name in ("phase", "matching", "looked", "number")]
    assert told == ["done", 251, 251, 250]
    assert done["notes"]["not_kept"] == 1
    assert api.center.counts("mail").waiting == 250
    again = api.ask("POST", "/v1/queues/mail/jobs", {"act": "retry", "exception": "OSError"})
    assert over_http(api, again.headers["location"])["number"] == 0
    assert api.center.counts("mail").waiting == 250  # each once
    forgot = api.ask("POST", "/v1/queues/mail/jobs", {"act": "forget", "task": "shop.*"})
    assert over_http(api, forgot.headers["location"])["number"] == 2
    assert api.center.failures.find("mail").failures == []


def test_a_reshard_is_a_job_that_goes_on_where_another_has_stopped(
    api: HttpServer, local: Visitor, center: TimeoutCenter
) -> None:
    put_many(center, 300)
    if not center.clustered:  # where nothing is moved, they stay until they are delivered
        assert center.registry.declared("mail").slots == 8
    form = local.get("limits?queue=mail")
    begun = local.send(form, "Reshard").headers["location"]  # as many as it has
    wait_for(local, begun, "Done: 0 messages moved.")
    job = begin(local, "0 of ", "reshard", slots="16")
    tell(local, job, "stop")
    wait_for(local, job, "Stopped: 0 messages moved.")
    path = "/v1/queues/mail/jobs"
    for wrong in (
        {"act": "reshard"},
        {"act": "cancel", "slots": 4},
        {"act": "reshard", "slots": 3},
        {"act": "reshard", "slots": 4, "task": "x"},
    ):
        assert api.ask("POST", path, wrong).status == 422, wrong
    if center.clustered:
        return
    asked = {"act": "reshard", "slots": 2, "settle": 1}
    begun = api.ask("POST", path, asked)
    assert (begun.status, begun.json["phase"], begun.json["slots"]) == (202, "running", 2)
    done = over_http(api, begun.headers["location"])
    assert (done["phase"], done["late"]) == ("done", 0)
    assert done["number"] == done["matching"] > 150
    center.registry.forget("mail")
    declared = center.registry.declared("mail").declaration
    assert (declared.slots, declared.draining_counts) == (2, ())
    assert center.counts("mail").waiting == 300
    said = [entry[1:4] for entry in audit(center) if entry[1] == "reshard all"]
    assert said[-2:] == [
        ["reshard all", "mail", "begins: messages in mail to 2 slots"],
        ["reshard all", "mail", "ends: messages in mail to 2 slots"],
    ]


def test_a_token_begins_only_what_its_role_allows(
    guarded_page: HttpServer, tokens: Any, center: TimeoutCenter
) -> None:
    center.put("mail", "one", b"{}", delay=3600)

    def begin(name: str, act: str, **more: int) -> int:
        headers = {"authorization": f"Bearer {tokens[name][0]}"}
        path = "/v1/queues/mail/jobs"
        return guarded_page.ask("POST", path, {"act": act, **more}, headers=headers).status

    assert begin("ben", "cancel") == begin("carl", "reshard", slots=8) == 403
    assert begin("carl", "requeue") == begin("carl", "retry") == 403
    assert begin("carl", "cancel") == begin("anna", "retry") == 202
