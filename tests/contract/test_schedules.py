"""Recurring tasks: what is kept of a schedule, and which message waits for its next firing."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import product
from pathlib import Path
from typing import Any

import celery.schedules
import pytest
import redis
from celery import Celery, group
from celery.schedules import crontab, solar

import celery_toc
import kombu_toc
from celery_toc import TaskCenter, aio, timeout_center
from celery_toc.schedules import state
from celery_toc.schedules.rules import ScheduleError, UnknownScheduleError
from celery_toc.worker import schedules as worker
from celery_toc.worker.schedules import Together, take
from kombu_toc import WAITING

from ..chaos.firings import chaos
from ..support.cases import each
from ..support.cluster import Cluster
from ..support.fixtures import own_server
from ..support.inspection import calls_of, now_us
from ..support.loops import watched
from ..support.servers import Server, SteppedServer

UTC = timezone.utc


def remind(*args: Any, **kwargs: Any) -> None:
    """What a schedule sends."""


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[SteppedServer]:
    """In the place of the server."""
    with SteppedServer(tmp_path) as made:
        yield made


@pytest.fixture
def app(request: pytest.FixtureRequest, client: redis.Redis) -> Iterator[Celery]:
    of_its_own = "stepped" in request.fixturenames
    server = request.getfixturevalue("stepped" if of_its_own else "server")
    with Celery("shop", broker=server.toc_url, set_as_current=False) as made:
        made.conf.update(timezone="Europe/Berlin", task_default_queue="jobs")
        made.task(name="shop.remind", shared=False)(remind)
        made.task(name="shop.hourly", expires=60, shared=False)(remind)
        yield made


@pytest.fixture
def center(app: Celery) -> Iterator[TaskCenter]:
    made = timeout_center(app)
    yield made
    made.client.close()


def waiting(center: TaskCenter, queue: str = "jobs") -> list[str]:
    return [one.id for one in center.scan(queue, state=WAITING, limit=1000).messages]


def pop(center: TaskCenter, queue: str = "jobs") -> list[kombu_toc.Delivery]:
    return center.pop(queue, 100).messages


def fire(center: TaskCenter, name: str, queue: str = "jobs") -> list[str]:
    """Deliver what is due, and take it as a worker does."""
    taken = []
    for delivery in pop(center, queue):
        verdict, _ = take(center.center.recurring, delivery, name)
        taken.append(verdict)
        center.ack([delivery])
    return taken


def counted(center: TaskCenter, since: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """How many firings this process has counted as run, and as missed."""
    counts = center.metrics.counts(center.registry.topic("jobs"))
    return counts.fired - since[0], counts.missed - since[1]


def bring_forward(center: TaskCenter, name: str) -> None:
    """Make the next firing due now, however long it had to wait."""
    center.run_now(there(center, name).next_id)


def run_next(center: TaskCenter, name: str = "a") -> kombu_toc.Delivery:
    """Have the next firing run now: what is delivered for it."""
    bring_forward(center, name)
    [delivery] = pop(center)
    assert take(center.center.recurring, delivery, name)[0] == "run"
    return delivery


def there(center: TaskCenter, name: str = "a") -> Any:
    """The schedule of that name."""
    found = center.schedules.get(name)
    assert found is not None
    return found


def look(center: TaskCenter) -> None:
    """What a worker does that looks for firings that are gone."""
    worker.Followers()(center.center, lambda *_: None, lambda: True)


@pytest.mark.cluster
def test_the_next_firing_waits_as_a_message_of_its_own(center: TaskCenter) -> None:
    made = center.schedules.put("nightly", "shop.remind", crontab(hour=3, minute=0), args=(7,))
    assert made.text == "0 3 * * *"
    assert made.timezone == "Europe/Berlin"
    assert made.next is not None and made.next > datetime.now(UTC)
    assert made.next.astimezone(made.schedule.tz).hour == 3
    assert made.next_id == f"nightly@{made.next:%Y-%m-%dT%H:%M:%SZ}"
    [found] = center.get(made.next_id)
    task = center.task(found)
    assert (task.name, task.args, task.eta) == ("shop.remind", [7], made.next)
    assert (made.task, made.args, made.kwargs, made.queue) == ("shop.remind", [7], {}, "jobs")
    assert waiting(center) == [made.next_id]
    assert center.schedules.get("nightly") == made
    assert center.schedules.get("daily") is None


@pytest.mark.cluster
def test_who_takes_a_firing_puts_the_next_one_once(center: TaskCenter) -> None:
    made = center.schedules.put("often", "shop.remind", timedelta(hours=1))
    delivery = run_next(center, "often")
    [second] = waiting(center)
    # Delivered again, because its worker died: nothing more is put.
    assert take(center.center.recurring, delivery, "often")[0] == "run"
    assert waiting(center) == [second]
    found = there(center, "often")
    assert found.next == made.next + timedelta(hours=1)
    assert (found.next_id, found.last, found.runs) == (second, made.next, 1)


def test_a_put_of_the_same_definition_changes_nothing(center: TaskCenter) -> None:
    made = center.schedules.put("a", "shop.remind", 60, args=(1,), kwargs={"b": 2})
    minute = timedelta(minutes=1)
    assert center.schedules.put("a", "shop.remind", minute, args=(1,), kwargs={"b": 2}) == made
    changed = center.schedules.put("a", "shop.remind", 60, args=(2,))
    assert changed.fingerprint != made.fingerprint
    assert (changed.next, changed.next_id) == (made.next, made.next_id)
    assert waiting(center) == [made.next_id]
    [found] = center.get(made.next_id)
    assert center.task(found).args == [2]


def test_another_time_replaces_the_firing_that_waits(center: TaskCenter) -> None:
    made = center.schedules.put("a", "shop.remind", crontab(hour=3))
    changed = center.schedules.put("a", "shop.remind", crontab(hour=4, minute=30))
    assert changed.next_id != made.next_id
    assert waiting(center) == [changed.next_id]


@own_server
@pytest.mark.cluster
def test_many_schedules_are_put_in_few_round_trips(center: TaskCenter, client: redis.Redis) -> None:
    center.schedules.put("there", "shop.remind", 3600, args=(0,))
    center.schedules.put("changes", "shop.remind", 3600, args=(0,))
    entries = [
        {"name": f"s{n}", "task": "shop.remind", "schedule": 3600, "args": (n,)} for n in range(300)
    ]
    entries[250]["kwargs"] = {"who": 'Zoë\'s "%s"'}
    entries[7]["queue"] = "other"
    entries += [
        {"name": "there", "task": "shop.remind", "schedule": 3600, "args": (0,)},
        {"name": "changes", "task": "shop.remind", "schedule": 3600, "args": (1,)},
        {"name": "s5", "task": "shop.remind", "schedule": 7200, "args": (5,)},  # once more
    ]
    before = calls_of(client, "evalsha")
    found = center.schedules.put_many(entries)
    calls = calls_of(client, "evalsha") - before
    assert [one.name for one in found] == [entry["name"] for entry in entries]
    assert [one.args[0] for one in found[:300]] == list(range(300))
    kept = {one.name: one for one in center.schedules.each()}
    assert kept == {one.name: one for one in found}
    assert len(waiting(center)) == 301 and len(waiting(center, "other")) == 1
    assert calls < 1.2 * len(entries)  # one script each, and a few more
    before = calls_of(client, "evalsha")
    assert center.schedules.put_many(entries[6:300]) == found[6:300]
    # What is there is read, a hundred together.
    assert calls_of(client, "evalsha") - before < len(entries) / 20
    for number in (6, 7, 250):  # the messages are those that Celery makes
        assert center.schedules.put(**entries[number]) == found[number]
    bad = [{"name": "x", "task": "shop.remind", "schedule": 60}, {**entries[0], "schedule": "no"}]
    with pytest.raises(ScheduleError, match=r"'s0'.*says nothing of when"):
        center.schedules.put_many(bad)
    assert center.schedules.get("x") is None


@pytest.mark.cluster
def test_firings_that_come_together_are_taken_together(
    center: TaskCenter, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that look at others first, that are late, and what is no firing, are left to be taken
    alone. There is one read for each pop; what was changed since is taken again."""
    recurring, runner = center.center.recurring, center.center.runner
    rules = [{}] * 30 + [{"overlap": "skip"}, {"misfire": "skip", "grace": 0}]
    center.schedules.put_many(
        {"name": f"s{n}", "task": "shop.remind", "schedule": 3600, "start": time.time() + 1, **more}
        for n, more in enumerate(rules)
    )
    ids = waiting(center)
    for id in ids:
        center.run_now(id)
    time.sleep(1.1)  # the last one is late by then, wherever this stood still
    center.put("jobs", "s30@mail", b"no firing")
    again: list[tuple[str, str]] = []
    reads: list[list[str]] = []
    read = recurring.read

    def counting(topic: str, names: list[str], **options: Any) -> Any:
        reads.append(names)
        return read(topic, names, **options)

    monkeypatch.setattr(recurring, "read", counting)
    together = Together(recurring, lambda one, name: again.append((one.id, name)))
    before = counted(center)
    taken = []
    for number in (1, 4, 100):
        delivered = center.pop("jobs", number).messages
        some, calls = together.take(delivered)
        if number == 4:
            center.schedules.pause(delivered[0].id.partition("@")[0])
            changed = delivered[0]
        runner.run_all(calls)
        taken += some
    assert [len(names) for names in reads] == [1, 4, 28]
    assert {id for _, id in taken} == {one for one in ids if one[:4] not in ("s30@", "s31@")}
    assert again == [(changed.id, changed.id.partition("@")[0])]
    assert counted(center, before) == (29, 0)
    assert len(waiting(center)) == 29  # what follows
    assert take(recurring, changed, again[0][1])[0] == "run"
    assert counted(center, before) == (30, 0)
    assert together.take([changed]) == ([], [])


@pytest.mark.cluster
def test_pause_resume_skip_and_delete(center: TaskCenter) -> None:
    schedules = center.schedules
    made = schedules.put("a", "shop.remind", timedelta(hours=1))
    assert schedules.pause("a").state == "paused"
    assert waiting(center) == []
    assert schedules.pause("a").next is None
    resumed = schedules.resume("a")
    assert (resumed.state, resumed.next) == ("active", made.next)
    assert waiting(center) == [made.next_id]
    skipped = schedules.skip_next("a")
    assert skipped.next == made.next + timedelta(hours=1)
    assert waiting(center) == [skipped.next_id]
    [left_out] = schedules.history("a")
    assert (left_out.id, left_out.outcome, left_out.started) == (made.next_id, "left out", None)
    assert schedules.delete("a")
    assert not schedules.delete("a")
    assert waiting(center) == []
    assert schedules.get("a") is None
    assert schedules.count() == 0
    for change in (schedules.pause, schedules.resume, schedules.skip_next, schedules.run_now):
        with pytest.raises(UnknownScheduleError, match="'a'"):
            change("a")


@pytest.mark.cluster
def test_schedules_are_listed_page_by_page(center: TaskCenter) -> None:
    for number in range(7):
        center.schedules.put(f"n{number}", "shop.remind", 3600 + number)
    for number in range(5):
        center.schedules.put(f"m{number}", "shop.remind", crontab(hour=3), queue="other")
    center.schedules.pause("n0")
    pages = [center.schedules.list(limit=3)]
    while pages[-1].after is not None:
        pages.append(center.schedules.list(limit=3, after=pages[-1].after))
    assert all(len(page.schedules) <= 3 for page in pages)
    names = [one.name for page in pages for one in page.schedules]
    assert names == ["n1", "n2", "n3", "n4", "n5", "n6", "n0", "m0", "m1", "m2", "m3", "m4"]
    assert [one.name for one in center.schedules.each()] == names
    assert center.schedules.count() == 12
    assert center.schedules.count(queue="other") == 5
    assert [one.name for one in center.schedules.list(queue="other").schedules] == names[7:]


@pytest.mark.cluster
def test_run_now_sends_a_task_beside(center: TaskCenter) -> None:
    made = center.schedules.put("a", "shop.remind", 3600, args=(1,))
    id = center.schedules.run_now("a")
    assert id.startswith("a@") and id.endswith("!")
    assert set(waiting(center)) == {id, made.next_id}
    assert fire(center, "a") == ["run"]
    assert waiting(center) == [made.next_id]
    [fired] = center.schedules.history("a")
    assert (fired.id, fired.by_hand) == (id, True)
    assert center.schedules.get("a").runs == 0


@pytest.mark.cluster
def test_a_schedule_moves_to_another_queue(center: TaskCenter) -> None:
    made = center.schedules.put("a", "shop.remind", 3600)
    moved = center.schedules.put("a", "shop.remind", 3600, queue="other")
    assert (waiting(center), waiting(center, "other")) == ([], [made.next_id])
    assert (moved.queue, moved.next, moved.created) == ("other", made.next, made.created)
    assert center.schedules.count() == 1


@pytest.mark.cluster
@pytest.mark.parametrize("dies_after", range(5))
def test_who_moves_a_schedule_and_dies_leaves_it_in_one_queue(
    center: TaskCenter, monkeypatch: pytest.MonkeyPatch, dies_after: int
) -> None:
    """It fires in the former queue or in the new one, and a repeated put ends the move."""
    made = center.schedules.put("a", "shop.remind", 3600)
    recurring = center.center.recurring
    calls = []

    def change(*args: Any) -> Any:
        if len(calls) == dies_after:
            raise ConnectionError
        calls.append(args)
        return type(recurring).change(recurring, *args)

    monkeypatch.setattr(recurring, "change", change)
    with contextlib.suppress(ConnectionError):
        center.schedules.put("a", "shop.remind", 3600, queue="other")
    monkeypatch.undo()
    monkeypatch.setattr(worker, "GONE_US", 0)
    look(center)
    assert waiting(center) + waiting(center, "other") == [made.next_id]
    assert there(center).next == made.next
    moved = center.schedules.put("a", "shop.remind", 3600, queue="other")
    assert (moved.queue, moved.next, moved.state) == ("other", made.next, "active")
    assert (waiting(center), waiting(center, "other")) == ([], [made.next_id])
    assert center.schedules.count() == 1


def fire_all(center: TaskCenter, name: str) -> list[str]:
    """Take firings until none is due."""
    return [verdict for some in iter(lambda: fire(center, name), []) for verdict in some]


@pytest.mark.parametrize("misfire", ["once", "skip", "all"])
def test_what_was_missed_while_nothing_ran(center: TaskCenter, misfire: str) -> None:
    made = center.schedules.put("a", "shop.remind", 0.2, misfire=misfire, grace=0.3)
    before = counted(center)
    time.sleep(1.5)  # the server's clock must go on
    verdicts = fire_all(center, "a")
    found = there(center)
    planned = (found.last - made.next) // timedelta(seconds=0.2) + 1
    fired, missed = counted(center, before)
    assert fired == verdicts.count("run")
    assert fired + missed == round((found.next - made.next) / timedelta(seconds=0.2))
    if misfire == "all":
        assert planned >= 7
        assert verdicts == ["run"] * planned
    elif misfire == "once":
        assert verdicts[0] == "run"
        assert len(verdicts) <= 3
    else:
        assert verdicts[0] == "drop"
        assert 1 <= verdicts.count("run") <= 3
        [*_, first] = center.schedules.history("a")
        assert (first.outcome, first.started, first.late) == ("skipped", None, None)
        assert re.match(r"late by [1-9]\.", first.reason)


@pytest.mark.one_server("its clock is set")
@pytest.mark.parametrize("every", [0.3, 3600], ids=["often", "hourly"])
@pytest.mark.parametrize("heal", ["put", "pause", "resume"])
def test_a_schedule_that_fired_while_the_clock_was_ahead_goes_on(
    stepped: SteppedServer, center: TaskCenter, heal: str, every: float
) -> None:
    center.schedules.put("a", "shop.remind", every)
    stepped.step(86_400 * 365)
    assert fire(center, "a") == ["run"]
    stepped.step(0.5)
    fire_all(center, "a")
    stepped.step(-86_400 * 365)
    before = now_us(center.client)
    if heal == "put":
        found = center.schedules.put("a", "shop.remind", every)
    else:
        if heal == "pause":
            center.schedules.pause("a")
        found = center.schedules.resume("a")
    assert found.next is not None
    assert before < found.next.timestamp() * 1e6 <= now_us(center.client) + 2 * every * 1e6
    assert waiting(center) == [found.next_id]
    bring_forward(center, "a")
    assert fire(center, "a") == ["run"]


@pytest.mark.one_server("its clock is set")
def test_a_cancelled_firing_stays_cancelled_although_the_clock_is_set_back(
    stepped: SteppedServer, center: TaskCenter
) -> None:
    made = center.schedules.put("a", "shop.remind", 3600)
    stepped.step(-86_400)
    center.cancel(made.next_id)
    look(center)
    found = center.schedules.get("a")
    assert waiting(center) == [found.next_id]
    assert found.next.timestamp() * 1e6 <= now_us(center.client) + 3600e6
    assert [one.outcome for one in center.schedules.history("a")] == ["lost"]
    assert made.next not in found.upcoming(30)


@pytest.mark.cluster
@pytest.mark.parametrize("then", ["edit", "move", "pause", "skip"])
def test_a_cancelled_firing_stays_cancelled_whatever_is_done_before_somebody_looks(
    center: TaskCenter, then: str
) -> None:
    made = center.schedules.put("a", "shop.remind", 3600)
    center.cancel(made.next_id)
    if then == "pause":
        center.schedules.pause("a")
        center.schedules.resume("a")
    elif then == "skip":
        center.schedules.skip_next("a")
    else:
        where = {"queue": "other"} if then == "move" else {}
        center.schedules.put("a", "shop.remind", 3600, args=(1,), **where)
    found = center.schedules.get("a")
    assert found.next == made.upcoming(3)[2 if then == "skip" else 1]
    assert waiting(center, found.queue) == [found.next_id]


@pytest.mark.cluster
@pytest.mark.parametrize("overlap", ["allow", "skip", "wait", "cancel"])
def test_a_firing_that_meets_the_former_one(center: TaskCenter, overlap: str) -> None:
    center.schedules.put("a", "shop.remind", 3600, overlap=overlap)
    recurring = center.center.recurring
    before = counted(center)
    former = run_next(center)
    bring_forward(center, "a")
    [second] = pop(center)
    verdict, now = take(recurring, second, "a")
    assert verdict == {"allow": "run", "skip": "drop"}.get(overlap, "wait")
    if overlap in ("allow", "skip"):
        assert center.schedules.get("a").runs == {"allow": 2, "skip": 1}[overlap]
        assert counted(center, before) == {"allow": (2, 0), "skip": (1, 1)}[overlap]
        return
    # It is given back for a while, and none is put behind it.
    assert center.release([second.due_at(now + 50_000)]) == 1
    [found] = center.get(second.id)
    assert (found.state, found.retries_left) == (WAITING, None)  # it counts as untried
    assert waiting(center) == [second.id]
    center.ack([former])
    [again] = center.pop("jobs", wait=5).messages
    assert again.id == second.id
    assert take(recurring, again, "a")[0] == "run"
    assert center.schedules.get("a").runs == 2


@pytest.mark.cluster
def test_a_reshard_leaves_schedules_where_they_are(
    center: TaskCenter, server: Server | Cluster
) -> None:
    center.queues.declare("jobs", slots=8)
    made = [center.schedules.put(f"s{n}", "shop.remind", 3600) for n in range(9)]
    for slots in (16, 2):
        kombu_toc.reshard_topic(center.center, "jobs", slots, settle=0)
        assert center.registry.topic("jobs").slots == slots
        assert {one.slot for one in center.get([one.next_id for one in made])} == {0}
        for one in made:
            bring_forward(center, one.name)
            assert fire(center, one.name) == ["run"]
        made = list(center.schedules.each())
        assert sorted(waiting(center)) == sorted(one.next_id for one in made)


def test_a_queue_that_cannot_be_looked_after_holds_up_no_other(
    center: TaskCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = ["a", "b", "c"]
    for queue in queues:
        center.schedules.put(queue, "shop.remind", 3600, queue=queue)
    seen, said = [], []
    clock = 0.0
    error: Exception = redis.ResponseError("WRONGTYPE")

    look_into = center.center.recurring.page

    def broken(queue: str, *how: Any, **more: Any) -> Any:
        seen.append(queue)
        if queue == "b":
            raise error
        return look_into(queue, *how, **more)

    monkeypatch.setattr(center.center.recurring, "page", broken)
    followers = worker.Followers(lambda: clock)

    def look() -> list[str]:
        seen.clear()
        followers(center.center, lambda level, text, *args: said.append(args[0]), lambda: True)
        return seen

    assert look() == queues
    assert said == ["b"]
    assert look() == []
    # Without a connection, none can be. But on a Cluster, others are on other nodes.
    error = redis.ConnectionError("cut")
    for clustered in (False, True):
        monkeypatch.setattr(center.center, "clustered", clustered)
        clock += worker.LOOK_INTERVAL
        with pytest.raises(redis.ConnectionError):
            look()
        assert seen == (queues if clustered else ["a", "b"]) and said == ["b"]
    assert look() == []


@pytest.mark.cluster
def test_looking_for_firings_that_are_gone_costs_the_same_whatever_waits(
    center: TaskCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    runner = center.center.runner
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda call: sent.append(run(call)) or sent[-1])
    costs = []
    for number in (3, 300):
        for n in range(number):
            center.schedules.put(f"s{n}", "shop.remind", 3600)
        sent.clear()
        look(center)
        costs.append(len(sent))
        assert [found for _, found, _ in sent] == [[]]
    assert costs == [1, 1]


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["cancel", "purge", "cancel what was found"])
def test_a_firing_that_is_cancelled_or_purged_is_lost_and_the_next_one_comes(
    center: TaskCenter, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Long before it was to be: nobody is told of a firing that will not come."""
    monkeypatch.setattr(worker, "GONE_US", 0)  # the server's clock need not advance
    names = [f"s{number}" for number in range(worker.PAGE + 5)]
    for name in names:
        center.schedules.put(name, "shop.remind", crontab(hour=3, minute=0, day_of_month=1))
    center.schedules.put("paused", "shop.remind", 3600)
    center.schedules.pause("paused")
    before = {one.name: one for one in center.schedules.each() if one.next is not None}
    ids = [before[name].next_id for name in names]
    if how == "purge":
        assert center.queues.purge("jobs") == len(names)
    elif how == "cancel":
        assert all(one.deleted for one in center.cancel(ids))
    else:
        assert all(one.deleted for one in center.cancel(center.get(ids)))
    follow = worker.Followers(iter(range(0, 1000, 10)).__next__)
    while len(waiting(center)) < len(names):
        follow(center.center, lambda *_: None, lambda: True)
    assert set(waiting(center)) == {center.schedules.get(name).next_id for name in names}
    for name in names:
        assert there(center, name).next == before[name].upcoming(2)[1]
        [lost] = center.schedules.history(name)
        assert (lost.id, lost.outcome) == (before[name].next_id, "lost")
    assert center.schedules.get("paused").next is None


class Moody(celery.schedules.schedule):
    """A schedule that somebody has written, which decides itself when it is due."""

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        return False, 1.0


class MoodyCrontab(crontab):
    is_due = Moody.is_due


@each(
    "how, said",
    [
        ({"schedule": "daily"}, "says nothing of when"),
        ({"schedule": 0}, "shortest interval"),
        ({"schedule": None}, "says nothing"),
        ({"name": ""}, "names no schedule"),
        ({"name": "a\nb"}, "control character"),
        ({"name": "x" * 251}, "names no schedule"),
        ({"misfire": "never"}, "'once', 'skip', 'all'"),
        ({"overlap": "no"}, "'allow', 'skip', 'wait'"),
        ({"grace": -1}, "no duration"),
        ({"jitter": "1"}, "no duration"),
        ({"max_runs": 0}, "max_runs"),
        ({"max_runs": True}, "max_runs=True is not 1 or more"),
        ({"max_runs": 2**53}, "max_runs=9007199254740992 is not"),
        ({"timezone": "Mars/Olympus"}, "no time zone"),
        ({"start": "tomorrow"}, "no time"),
        ({"start": 2e9, "end": 1e9}, "ends before"),
        ({"schedule": math.nan}, "says nothing of when"),
        ({"schedule": math.inf}, "says nothing of when"),
        ({"schedule": solar("sunrise", math.nan, 0)}, "latitude nan.*says nothing of when"),
        ({"schedule": 1e300}, "after the year 2255"),
        ({"schedule": timedelta.max}, "after the year 2255"),
        ({"schedule": Moody(60)}, "its class Moody decides"),
        ({"schedule": MoodyCrontab()}, "its class MoodyCrontab decides"),
        ({"grace": math.nan}, "grace=nan is no duration"),
        ({"jitter": math.inf}, "jitter=inf is no duration"),
        ({"start": math.nan}, "start=nan is no time"),
        ({"end": math.inf}, "end=inf is no time"),
        ({"end": 1e9}, "end=2001-09-09.* is in the past"),
        ({"options": {"expires": -1}}, "expires=-1 is no duration"),
        ({"options": {"expires": 0}}, "expires=0"),
        ({"options": {"expires": datetime(2001, 9, 9)}}, "expires=2001-09-.* is in the past"),
        ({"options": {"expires": "2001-09-09T00:00:00"}}, "expires=2001-09-.* is in the past"),
        ({"options": {"expires": math.nan}}, "expires=nan is no duration"),
        ({"exclude": "tomorrow"}, "exclude='tomorrow': time data"),
        ({"exclude": 7}, "exclude=.7.: it is neither"),
        ({"exclude": [datetime(2026, 12, 25)]}, "exclude='2026-12-25 00:00:00': it is neither"),
        ({"exclude": Path("/no/such/file")}, "exclude='/no/such/file': .*No such file"),
        ({"either_day": True}, "either_day is for a crontab"),
        ({"options": {"eta": 1}}, "eta"),
        ({"options": {"countdown": 1}}, "countdown"),
        ({"task": 7}, "neither a task"),
        ({"task": ""}, "'' is neither a task"),
        ({"queue": 7}, "queue=7 is no name"),
        ({"options": {"queue": b"mail"}}, "queue=b'mail' is no name"),
        ({"owner": b"me"}, "owner=b'me' is no name"),
        ({"options": 7}, "options=7 is no mapping"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused_and_nothing_is_kept(
    center: TaskCenter, how: dict[str, Any], said: str
) -> None:
    given = {"name": "a", "task": "shop.remind", "schedule": 60, **how}
    with pytest.raises(ScheduleError, match=said):
        center.schedules.put(given.pop("name"), given.pop("task"), given.pop("schedule"), **given)
    assert center.schedules.count() == 0
    assert waiting(center) == []


def test_what_a_schedule_cannot_send_is_refused(app: Celery, center: TaskCenter) -> None:
    """Several tasks, and one with a unique key."""
    remind = app.tasks["shop.remind"]
    unique = celery_toc.unique(key="x", until="done")
    for task, options, said in (
        (group(remind.s(1), remind.s(2)), None, "sends one task"),
        ("shop.remind", unique, "unique key"),
    ):
        with pytest.raises(ScheduleError, match=said):
            center.schedules.put("a", task, 60, options=options)
    assert center.schedules.count() == 0


def test_what_holds_for_a_message_of_its_own_holds_for_each_firing(center: TaskCenter) -> None:
    """Its key, its visibility and its max lease are those that the headers say."""
    headers = {"x-key": "customer 42", "x-visibility": 7, "x-max-lease": 9}
    made = center.schedules.put(
        "a", "shop.remind", 3600, options={"headers": headers}, overlap="skip"
    )
    for _ in range(2):
        delivery = run_next(center)
        told = (delivery.key, delivery.visibility, delivery.outlives_ack)
        assert told == ("customer 42", 7.0, True)
        assert delivery.ends_us is not None
        center.ack([delivery])
    assert center.schedules.get("a").last == made.next + timedelta(hours=1)


def test_a_firing_expires_after_its_planned_time(center: TaskCenter) -> None:
    """By an option, or by what the task says."""
    for name, task, options in (("a", "shop.remind", {"expires": 90}), ("b", "shop.hourly", {})):
        made = center.schedules.put(name, task, 3600, options=options)
        for _ in range(2):
            [found] = center.get(made.next_id)
            expires = datetime.fromisoformat(center.task(found).headers["expires"])
            assert expires - made.next == timedelta(seconds=90 if name == "a" else 60)
            made = center.schedules.skip_next(name)


def test_each_firing_has_a_token_of_its_own_that_leads_to_its_row(center: TaskCenter) -> None:
    """It ends with what its business id adds, if it has one."""
    for name, headers in (("a", {}), ("b", {"x-biz-id": "order 7"})):
        ends = kombu_toc.token_with("", headers)
        assert bool(ends) == bool(headers)
        made = center.schedules.put(name, "shop.remind", 60, options={"headers": headers})
        tokens = []
        for _ in range(2):
            [found] = center.get(made.next_id)
            properties = kombu_toc.unpack(found.body, found.id)["properties"]
            assert properties["correlation_id"] == found.id
            tokens.append(properties["k"])
            made = center.schedules.skip_next(name)
        assert all(len(one) == 8 + len(ends) and one.endswith(ends) for one in tokens), tokens
        assert tokens[0][:8] != tokens[1][:8]


def test_the_message_is_celerys_own(app: Celery, center: TaskCenter) -> None:
    options = {"priority": 4, "headers": {"tenant": "x"}, "time_limit": 9, "compression": "gzip"}
    made = center.schedules.put(
        "a", app.tasks["shop.remind"], 3600, args=(1,), kwargs={"k": [1, None]}, options=options
    )
    [ours] = center.get(made.next_id)
    center.schedules.delete("a")
    app.tasks["shop.remind"].apply_async(
        (1,), {"k": [1, None]}, task_id=made.next_id, eta=made.next, **options
    )
    [celerys] = center.get(made.next_id)
    one, other = (kombu_toc.unpack(found.body, found.id) for found in (ours, celerys))
    assert one["headers"].pop("x-schedule") == "a"
    assert one["headers"].pop("x-slot-basis")
    for message in (one, other):
        message["properties"].pop("k")  # names the publish
    assert one == other
    assert (ours.step, ours.time_us) == (celerys.step, celerys.time_us)


def test_who_has_read_a_schedule_before_others_went_on_with_it_changes_nothing(
    center: TaskCenter,
) -> None:
    """Its lease had ended, and it goes on when others have come two firings further."""
    made = center.schedules.put("a", "shop.remind", 3600)
    bring_forward(center, "a")
    [delivery] = pop(center)
    recurring = center.center.recurring
    verdicts = []

    class Slow:
        """Reads, and then is slower than the others."""

        def read(self, *args: Any, **options: Any) -> Any:
            found = recurring.read(*args, **options)
            if not verdicts:
                verdicts.append(take(recurring, delivery, "a")[0])
                bring_forward(center, "a")
                verdicts.extend(fire(center, "a"))
            return found

        change = recurring.change

    verdicts.append(take(Slow(), delivery, "a")[0])
    assert verdicts == ["run", "run", "run"]
    found = there(center)
    assert waiting(center) == [found.next_id]
    assert (found.runs, found.next) == (2, made.next + timedelta(hours=2))


def test_a_firing_is_one_message_whoever_dies_when(
    server: Server | Cluster, client: redis.Redis
) -> None:
    found = chaos(server.toc_url, 3000, seed=2, seconds=60)
    assert found.firings >= 2800
    assert (found.duplicates, found.missed, found.never_run) == ([], [], [])
    assert found.unfollowed == [] and found.purges > 5
    # Now and then one dies at a command between these, as when it asks for its queue.
    steps = product(("before", "after"), ("pop", "recurring", "recur", "ack"))
    assert found.deaths.keys() >= set(steps)


@pytest.mark.cluster
async def test_schedules_are_put_and_changed_from_an_event_loop(
    app: Celery, server: Server | Cluster, client: redis.Redis
) -> None:
    schedules = aio.timeout_center(app).schedules
    made = await schedules.put("a", app.tasks["shop.remind"], 3600, args=(1,))
    assert made == await schedules.get("a")
    assert (await schedules.list()).schedules == [made]
    assert [one async for one in schedules.each()] == [made]
    waiting = await aio.timeout_center(app).scheduled(["jobs"], 9)
    assert [task.id for task in waiting] == [made.next_id]
    assert (await schedules.pause("a")).paused
    assert (await schedules.resume("a")).next == made.next
    assert (await schedules.skip_next("a")).next == made.next + timedelta(hours=1)
    assert (await schedules.run_now("a")).endswith("!")
    assert [one.outcome for one in await schedules.history("a")] == ["started", "left out"]
    with pytest.raises(UnknownScheduleError):
        await schedules.pause("b")
    assert await schedules.delete("a")
    assert await schedules.count() == 0
    await aio.aclose(app)


async def test_many_schedules_are_put_while_the_loop_turns(
    app: Celery, client: redis.Redis
) -> None:
    class Slow(celery.Task):
        def apply_async(self, *args: Any, **options: Any) -> Any:
            time.sleep(1)  # as a broker that is slow to declare a queue
            return super().apply_async(*args, **options)

    @app.task(base=Slow, name="shop.slow")
    def slow() -> None:
        pass

    schedules = aio.timeout_center(app).schedules
    entries = ({"name": name, "task": slow, "schedule": 60} for name in ("a", "b"))
    async with watched():
        made = await schedules.signed("me").put_many(entries)
    assert [one.name for one in made] == ["a", "b"]
    assert made == [one async for one in schedules.each()]
    assert made[0].edits[0].by == "me"
    await aio.aclose(app)


def test_what_is_running_is_known_however_many_were_left_out_meanwhile(center: TaskCenter) -> None:
    center.schedules.put("often", "shop.remind", 0.02, overlap="skip")
    verdicts: Counter[str] = Counter()
    while verdicts[state.DROP] < 30:
        for delivery in center.center.pop("jobs").messages:
            verdict, _ = take(center.center.recurring, delivery, "often")
            verdicts[verdict] += 1
            if verdict == state.DROP:
                center.ack(delivery)
    assert verdicts[state.RUN] == 1


def test_a_name_that_another_app_has_taken_meanwhile_is_not_taken_over(center: TaskCenter) -> None:
    center.schedules.put("cleanup", "shop.remind", 60, owner="beat:a")
    plan = center.schedules.plan("cleanup", "shop.remind", 30, owner="beat:b")
    with pytest.raises(ScheduleError, match="somebody else has put"):
        for kept in center.schedules.keep_many([plan], own=True):
            raise kept
    assert center.schedules.get("cleanup").owner == "beat:a"


# -- what comes back, and what moves


@pytest.mark.parametrize("overlap", ["skip", "wait"])
def test_a_firing_that_comes_back_while_the_next_one_runs_does_not_run_beside_it(
    center: TaskCenter, overlap: str
) -> None:
    """Its worker died; it acknowledges late."""
    center.schedules.put("a", "shop.remind", 3600, overlap=overlap)
    recurring = center.center.recurring
    first = run_next(center)
    center.reject(first, requeue=True, backoff=0)
    bring_forward(center, "a")
    [again, second] = sorted(pop(center), key=lambda one: one.id)
    assert again.id == first.id and again.failures
    center.release([again])
    assert take(recurring, second, "a")[0] == "run"
    [again] = pop(center)
    before = counted(center)
    verdict, now = take(recurring, again, "a")
    told = (verdict, *counted(center, before))
    if overlap == "skip":
        assert told == ("drop", 0, 1)
        [_, line] = center.schedules.history("a")
        assert (line.outcome, line.reason) == ("skipped", "another firing was running")
        return
    assert told == ("wait", 0, 0)
    center.release([again.due_at(now)])
    center.ack([second])
    [again] = center.pop("jobs", wait=5).messages
    assert take(recurring, again, "a")[0] == "run"
    assert counted(center) == before


@pytest.mark.cluster
def test_a_firing_that_is_due_moves_along_with_its_schedule(center: TaskCenter) -> None:
    made = center.schedules.put("a", "shop.remind", 0.2)
    time.sleep(0.3)  # the server's clock must go on
    moved = center.schedules.put("a", "shop.remind", 0.2, queue="other")
    assert moved.next == made.next
    assert (waiting(center), waiting(center, "other")) == ([], [made.next_id])
    assert fire(center, "a", "other")[0] == "run"


def test_a_firing_that_is_being_run_does_not_move_along(center: TaskCenter) -> None:
    made = center.schedules.put("a", "shop.remind", 0.2)
    time.sleep(0.3)  # the server's clock must go on
    [delivery] = pop(center)
    moved = center.schedules.put("a", "shop.remind", 0.2, queue="other")
    assert delivery.id == made.next_id
    assert moved.next > made.next
    assert take(center.center.recurring, delivery, "a")[0] == "run"


def test_a_firing_that_is_taken_during_a_move_does_not_move_along(
    center: TaskCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = center.schedules.put("a", "shop.remind", 0.2)
    time.sleep(0.3)  # the server's clock must go on
    recurring = center.center.recurring
    got: list[kombu_toc.Delivery] = []

    def change(topic: str, what: Any) -> Any:
        if topic == "jobs" and not got:  # between the look and the removal
            got.extend(pop(center))
        return type(recurring).change(recurring, topic, what)

    monkeypatch.setattr(recurring, "change", change)
    moved = center.schedules.put("a", "shop.remind", 0.2, queue="other")
    assert [one.id for one in got] == [made.next_id]
    assert moved.next > made.next
    assert waiting(center, "other") == [moved.next_id]


def test_a_range_of_the_past_is_back_filled_once_and_at_a_rate(center: TaskCenter) -> None:
    """Each of its times is a task of its own, however often that is asked for; those for which a
    firing has come are left out, and the schedule goes on."""
    made = center.schedules.put("a", "shop.remind", 3600, args=(7,), options={"expires": 600})
    bring_forward(center, "a")
    assert fire(center, "a") == ["run"]
    now = now_us(center.client) / 1e6
    start = now - 300 * 3600
    with pytest.raises(ScheduleError, match="more than 100 times"):
        center.schedules.backfill("a", start, limit=100)
    odd = [("rate", "fast"), ("rate", math.nan), ("limit", "all"), ("limit", 0), ("limit", True)]
    for what, value in odd:
        with pytest.raises(ScheduleError, match=f"{what}="):
            center.schedules.backfill("a", start, **{what: value})
    assert len(waiting(center)) == 1
    began = time.monotonic()
    ids = center.schedules.backfill("a", start, rate=1000)
    took = timedelta(seconds=time.monotonic() - began)
    assert len(set(ids)) == 300 and set(ids) <= set(waiting(center)) and made.next_id not in ids
    assert center.schedules.backfill("a", start) == []
    task, second = center.tasks([center.get(ids[0])[0], center.get(ids[200])[0]])
    # What is put late is due when it is put.
    assert timedelta(seconds=0.05) < second.eta - task.eta <= timedelta(seconds=0.2) + took
    assert (task.args, task.id) == ([7], ids[0])
    expires = kombu_toc.unpack(center.get(ids[0])[0].body, id=ids[0])["headers"]["expires"]
    assert datetime.fromisoformat(expires).timestamp() == pytest.approx(now + 600, abs=10)
    time.sleep(0.35)  # the last of them is due by the server's clock
    gone = []
    while delivered := pop(center):
        gone += [take(center.center.recurring, one, "a")[0] for one in delivered]
        center.ack(delivered)
    assert gone == ["run"] * 300
    found = there(center)
    assert (found.next, found.runs) == (made.next + timedelta(hours=1), 1)
    assert waiting(center) == [found.next_id]
    assert center.schedules.backfill("a", start) == []


@pytest.mark.cluster
@pytest.mark.parametrize("end", ["pause", "delete"])
def test_what_waits_of_back_fills_goes_with_a_pause_and_a_deletion(
    center: TaskCenter, end: str
) -> None:
    """Also of a second one, on both sides of times that came before; another schedule's stays."""
    schedules = center.schedules
    for name in ("a", "b"):
        schedules.put(name, "shop.remind", timedelta(hours=1))
    now = now_us(center.client) / 1e6
    for first, last in ((30, 20), (200, 0), (900, 700)):
        assert schedules.backfill("a", now - first * 3600, now - last * 3600, rate=0.01)
    kept = schedules.backfill("b", now - 10 * 3600, rate=0.01)
    [delivered] = center.pop("jobs", 1).messages
    getattr(schedules, end)("a")
    left = {*kept, str(schedules.get("b").next_id)}
    assert {*waiting(center)} == left - {delivered.id}
    if end == "pause":
        assert schedules.backfill("a", now - 950 * 3600, now - 901 * 3600, rate=0.01)
        schedules.resume("a")
        assert len(waiting(center)) > 40  # a back-fill of what is paused is meant


@each(
    ("start", "end", "how", "said"),
    [
        (50, 100, {}, "no range of the past"),
        (50, -20, {}, "no range of the past"),
        (50, 0, {"rate": 0}, "rate=0 is not"),
        (50, 0, {"rate": math.nan}, "rate=nan is not"),
        (50, 0, {"limit": 10_001}, "limit=10001 is not"),
        (math.nan, 0, {}, "start=nan is no time"),
    ],
)
def test_a_back_fill_that_makes_no_sense_sends_nothing(
    center: TaskCenter, start: float, end: float, how: dict[str, Any], said: str
) -> None:
    """start, end: minutes ago"""
    center.schedules.put("a", "shop.remind", 60)
    now = now_us(center.client) / 1e6
    with pytest.raises(ScheduleError, match=said):
        center.schedules.backfill("a", now - 60 * start, now - 60 * end, **how)
    assert len(waiting(center)) == 1
    with pytest.raises(UnknownScheduleError):
        center.schedules.backfill("b", now - 60)


def test_a_schedule_does_not_fire_on_the_days_of_a_calendar(
    center: TaskCenter, tmp_path: Path
) -> None:
    lines = tmp_path / "holidays.txt"
    lines.write_text("# ours\n2030-01-01, New Year\n\n20300106 # Epiphany\n")
    events = tmp_path / "holidays.ics"
    events.write_text(
        "BEGIN:VCALENDAR\r\nBEGIN:VEVENT\r\nDTSTART;VALUE=DATE:20300102\r\n"
        "DTEND;VALUE=DATE:20300104\r\nSUMMARY:Inventory\r\nEND:VEVENT\r\nEND:VCALENDAR\r\n"
    )
    start = datetime(2030, 1, 1)
    made = center.schedules.put(
        *("a", "shop.remind", crontab(hour="9", minute="0")),
        start=start,
        exclude=[lines, events, "2030-01-05", start.date()],
    )
    assert [str(day)[-2:] for day in made.exclude] == ["01", "02", "03", "05", "06"]
    assert [moment.day for moment in made.upcoming(3)] == [4, 7, 8]
    events.write_text(events.read_text().replace("SUMMARY", "RRULE:FREQ=YEARLY\r\nSUMMARY"))
    with pytest.raises(ScheduleError, match="an event repeats"):
        center.schedules.put("b", "shop.remind", 60, exclude=events)


def test_who_has_changed_a_schedule_and_what_is_remembered(center: TaskCenter) -> None:
    schedules = center.schedules.signed("ann")
    schedules.put("a", "shop.remind", 60)
    schedules.put("a", "shop.remind", 60)
    schedules.put("a", "shop.remind", 60, overlap="skip")
    center.schedules.put("a", "shop.remind", 60, overlap="skip", queue="other")
    schedules.signed("bob").pause("a")
    schedules.pause("a")
    schedules.resume("a")
    schedules.run_now("a")
    schedules.backfill("a", now_us(center.client) / 1e6 - 90)
    found = there(center)
    told = [(one.by, one.what.partition(",")[0]) for one in found.edits]
    assert [by for by, _ in told if "@" not in by] == ["ann"] * 3 + ["bob"] + ["ann"] * 2
    assert [what for _, what in told] == [
        *("sent 2 of the past", "ran it by hand", "resumed", "paused"),
        *("moved to queue other", "put: overlap allow -> skip", "put"),
    ]
    assert all(abs(one.at.timestamp() - now_us(center.client) / 1e6) < 60 for one in found.edits)
