"""Sends tasks through Celery, as it is told over standard input (see `commands`)."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import datetime, timezone
from typing import Any

import commands
from app import app, fire, nap, tick
from celery.schedules import crontab
from kombu.messaging import Producer

#: What a worker's heartbeat tells beside its name.
WORKER = {
    "active": 0,
    "processed": 0,
    "loadavg": [0.0, 0.0, 0.0],
    "sw_ident": "py-celery",
    "sw_ver": "5",
    "sw_sys": "Linux",
}


def prepare() -> None:
    """Connect, and declare what a worker would declare."""
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        for queue in app.amqp.queues.consume_from.values():
            queue(channel).declare()
            if app.conf.get("task_default_queue_type") == "quorum":
                from kombu.transport import native_delayed_delivery as delayed

                delayed.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
                delayed.bind_queue_to_native_delayed_delivery_exchange(connection, queue)
    with app.producer_or_acquire() as producer:
        producer.connection.ensure_connection()


def warm_up(tasks: int, **options: Any) -> None:
    """Send tasks that are in no result."""
    for _ in range(tasks):
        tick.apply_async((commands.WARM_UP,), **options)


def publish(
    tasks: int, countdown: float | None = None, spread: float = 0.0, batch: int = 0
) -> float | None:
    """Send tasks as fast as it goes; return how many seconds that took.

    countdown, spread: seconds until the first is due, and over how many the others are
    batch: so many at once, where Kombu and the transport can; None if they cannot
    """
    with app.producer_or_acquire() as producer:
        if batch and not getattr(producer, "supports_batch_publish", False):
            return None
        assert isinstance(producer, Producer)
        began = time.perf_counter()
        with producer.batch(batch) if batch else nullcontext():
            for number in range(tasks):
                when = {}
                if countdown is not None:
                    when["countdown"] = countdown + spread * number / tasks
                tick.apply_async((number,), producer=producer, **when)
        return time.perf_counter() - began


def together(tasks: int, at: float, first: int = 0, seconds: float = 0.0) -> None:
    """Send tasks that are due at one instant."""
    eta = datetime.fromtimestamp(at, timezone.utc)
    for number in range(first, first + tasks):
        if seconds:
            nap.apply_async((number, seconds), eta=eta)
        else:
            tick.apply_async((number,), eta=eta)


def stream(tasks: int, gap: float, first: int) -> list[tuple[int, float]]:
    """Send immediate tasks `gap` seconds apart; (number, time) of each."""
    found = []
    for number in range(first, first + tasks):
        found.append((number, time.time()))
        tick.delay(number)
        time.sleep(gap)  # what comes in is a stream
    return found


def keyed(
    tasks: int,
    queue: str | None = None,
    key: str | None = None,
    keys: int = 0,
    first: int = 0,
    gap: float = 0.0,
    seconds: float = 0.0,
) -> list[tuple[int, float]]:
    """Send immediate tasks; (number, time) of each.

    queue: where they go, if not where all do
    key, keys: their key, or how many keys they have in turn
    gap: seconds between two
    seconds: how long each takes
    """
    found = []
    options: dict[str, Any] = {"queue": queue} if queue else {}
    with app.producer_or_acquire() as producer:
        for number in range(first, first + tasks):
            if key or keys:
                options["headers"] = {"x-key": key or f"key-{number % keys}"}
            found.append((number, time.time()))
            if seconds:
                nap.apply_async((number, seconds), producer=producer, **options)
            else:
                tick.apply_async((number,), producer=producer, **options)
            if gap:
                time.sleep(gap)  # what comes in is a stream
    return found


def one_nap(number: int, seconds: float) -> None:
    """Send a task that takes that long."""
    nap.delay(number, seconds)


def schedule_over(queues: int, tasks: int) -> list[str]:
    """Declare so many queues, schedule tasks in some of them for a day later; return their ids."""
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        for number in range(queues):
            channel.queue_declare(f"q{number}", durable=True)
    return [
        tick.apply_async((n,), countdown=86_400, queue=f"q{n * 7 % queues}").id
        for n in range(tasks)
    ]


def revoke(ids: list[str]) -> float:
    """Revoke one after the other; return how many seconds that took."""
    began = time.perf_counter()
    for id in ids:
        app.control.revoke(id)
    return time.perf_counter() - began


def recur(every: float, number: int, within: float = 0.0, delay: int = 1) -> None:
    """Have so many schedules fire every so many seconds.

    within: seconds over which a round of them is spread
    delay: seconds until the first round, from the next second on
    """
    schedules, first = _schedules(), float(int(time.time()) + delay)
    for one in range(number):
        start = first + within * one / number
        schedules.put(f"fire-{one}", fire, every, args=[one], start=start)


def stop_recurring() -> dict[str, tuple[int, int, int]]:
    """End them: name -> (number, its first planned time, its last), in milliseconds."""
    schedules, found = _schedules(), {}
    for one in list(schedules.each()):
        last = schedules.pause(one.name).last
        first = round(one.start.timestamp() * 1000)
        found[one.name] = (int(one.name.partition("-")[2]), first, round(last.timestamp() * 1000))
    return found


def put_schedules(number: int) -> float:
    """Put schedules that fire in half a day; return how many seconds that took."""
    schedules = _schedules()
    hour = (time.gmtime().tm_hour + 12) % 24
    began = time.perf_counter()
    for one in range(number):
        schedules.put(f"nightly-{one}", tick, crontab(minute=str(one % 60), hour=hour), args=[one])
    return time.perf_counter() - began


def copy_schedules(number: int) -> None:
    """Put so many more that are like the first of those, in batches: faster than one by one."""
    import kombu_toc
    from celery_toc import timeout_center
    from celery_toc.schedules.messages import firing_of
    from celery_toc.schedules.state import firing_id

    center = timeout_center(app).center
    _, [found] = center.recurring.find("nightly-0", template=True)
    topic, rest = center.registry.topic(found.topic), found.record.partition("\n")[2]
    calls = []
    for one in range(number):
        name = f"copy-{one}"
        message = kombu_toc.unpack(found.template)
        message["headers"][kombu_toc.SCHEDULE] = name
        template = kombu_toc.pack(message, deflate=found.template[:1] != b"{")
        firing = firing_of(name, template, found.next_us, found.next_us, 0, None)
        record = f"{firing_id(name, found.next_us)}\n{rest}"
        change = kombu_toc.ScheduleChange(name, "", record, found.next_us, template, put=firing)
        calls.append(center.recurring.changing(topic, change))
        if len(calls) == 500 or one == number - 1:
            center.runner.run_puts(calls)
            calls = []


def _schedules() -> Any:
    from celery_toc import timeout_center

    return timeout_center(app).schedules


def events(workers: int, events: int, seconds: float) -> tuple[int, int, float]:
    """Send what the workers of a fleet send: (heartbeats, events of tasks, seconds it took)."""
    beats = others = 0
    with app.connection_for_write() as connection:
        fleet = [
            app.events.Dispatcher(connection, hostname=f"fleet{number}@bench")
            for number in range(workers)
        ]
        beat_gap, event_gap = 2.0 / workers, 1.0 / events
        began = now = time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            if now >= began + beats * beat_gap:
                fleet[beats % workers].send("worker-heartbeat", freq=2, **WORKER)
                beats += 1
            elif now >= began + others * event_gap:
                fleet[others % workers].send("task-started", uuid=f"task-{others}")
                others += 1
            else:
                time.sleep(0.0005)  # the next is not due
    return beats, others, now - began


if __name__ == "__main__":
    commands.serve(
        prepare=prepare,
        warm_up=warm_up,
        publish=publish,
        together=together,
        stream=stream,
        keyed=keyed,
        nap=one_nap,
        schedule_over=schedule_over,
        revoke=revoke,
        events=events,
        recur=recur,
        stop_recurring=stop_recurring,
        put_schedules=put_schedules,
        copy_schedules=copy_schedules,
        sparse=lambda **options: commands.sparse(
            lambda number, wait: tick.apply_async((number,), countdown=wait), **options
        ),
        one_by_one=lambda **options: commands.one_by_one(tick.delay, **options),
    )
