"""``/scale``: what an autoscaler is told is counted, and no message is read."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kombu_toc import LibraryError, TimeoutCenter, center_for
from kombu_toc.http.library import FarAhead

from ..support.http_server import HttpServer
from ..support.inspection import commands_run
from ..support.library import close_libraries
from ..support.servers import Server

pytestmark = pytest.mark.one_server("MONITOR tells of one")

#: What gives entries of a sorted set, or bodies, and not how many there are.
READS = {"ZRANGE", "ZRANGEBYSCORE", "ZREVRANGE", "ZPOPMIN", "ZSCAN", "HMGET", "HVALS", "HSCAN"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One of its own: MONITOR tells of everybody's commands."""
    with Server(tmp_path_factory.mktemp("scale")) as made:
        yield made


def test_a_storm_that_comes_is_counted_and_not_read(server: Server) -> None:
    with server.client() as client, HttpServer(server.toc_url) as api:
        center = TimeoutCenter(client, grace=0)
        center.put_many("mail", [(f"now-{n}", b"x") for n in range(30)])
        center.pop("mail", 10)

        def ask(coming: int) -> list[str]:
            """Ask twice; return the names of the commands that this takes."""
            assert api.get("/scale/mail").status == 200  # scripts and declaration are known
            with commands_run(server) as found:
                assert api.get("/scale/mail").json["value"] == 30
                assert api.get("/scale/mail?within=300").json["value"] == 30 + coming
            return [command[0].upper() for command in found]

        def storm(numbers: range) -> None:
            for due in (200, 400):
                center.put_many("mail", [(f"{due}-{n}", b"x", None, due) for n in numbers])

        storm(range(200))  # there is something in each slot
        few = ask(200)
        storm(range(200, 4000))
        many = ask(4000)
    assert READS.isdisjoint(many)
    # The others are what this process counts, and a declaration that is read again.
    assert many.count("ZCOUNT") == few.count("ZCOUNT") > 0
    assert many.count("EVALSHA") <= few.count("EVALSHA") + 2


HOUR = 3600


@pytest.fixture
def library(server: Server, tmp_path: Path) -> Iterator[Path]:
    """A library with what is due in two and in three hours; what is due in half an hour is in
    Redis."""
    made = tmp_path / "library.db"
    with server.client() as client:
        client.flushall()
    center = center_for(server.toc_url, toc_library=f"sqlite:///{made}")
    center.queues.declare("far", horizon=HOUR)
    for hours in (0.5, 2, 3):
        center.put("far", f"in {hours}", b"x", delay=hours * HOUR)
    yield made
    close_libraries()
    with server.client() as client:
        client.flushall()


def told(api: HttpServer, within: float = 0) -> dict[str, Any]:
    reply = api.get(f"/scale/far?within={within}")
    assert reply.status == 200, reply
    found: dict[str, Any] = reply.json
    return found


def test_what_comes_due_in_the_library_only_is_counted(server: Server, library: Path) -> None:
    with HttpServer(f"{server.toc_url}?toc_library=sqlite:///{library}") as api:
        found = [told(api, hours * HOUR) for hours in (0, 1, 2.5, 24)]
        assert [one["value"] for one in found] == [0, 1, 2, 3]
        assert [one["far"] for one in found] == [0, 0, 1, 2]
        # No worker was there to put them into Redis in time. If nobody counted them, an autoscaler
        # that has ended all workers would never start one.
        with sqlite3.connect(library) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE name LIKE 'toc_pend%'")
            for [name] in [one for one in tables if one[0].rpartition("_")[2].isdigit()]:
                database.execute(f"UPDATE {name} SET action_us = action_us - {4 * HOUR}000000")
        assert told(api) == {"value": 2, "due": 2, "ready": 0, "inFlight": 0, "far": 2}


def test_queues_with_a_library_are_purged_and_deleted_and_their_dead_letters_requeued(
    server: Server, library: Path
) -> None:
    center = center_for(server.toc_url, toc_library=f"sqlite:///{library}")
    for id in ("again", "gone"):
        center.put("mail", id, b"x")
        center.bury(center.pop("mail").messages[0], reason="on purpose")
    with HttpServer(f"{server.toc_url}?toc_library=sqlite:///{library}") as api:
        done = [
            api.post("/v1/queues/mail/dead:requeue", {"ids": ["again"]}),
            api.post("/v1/queues/mail/dead:purge", {"ids": ["gone"]}),
            api.post("/v1/queues/far:purge"),
            api.ask("DELETE", "/v1/queues/far"),
        ]
    assert [reply.status for reply in done] == [200, 200, 200, 200], done
    assert center.counts("mail").ready == 1
    assert center.queues.names() == ["mail"]


@pytest.mark.parametrize("options", ["", "?toc_library=sqlite:////dev/null/library.db"])
def test_without_the_library_it_is_told_what_is_in_redis(
    server: Server, library: Path, options: str
) -> None:
    with HttpServer(f"{server.toc_url}{options}") as api:
        assert told(api, 24 * HOUR) == {
            **{"value": 1, "due": 1, "ready": 0, "inFlight": 0},
            "far": None,
        }


@pytest.mark.parametrize(
    "url, far",
    [
        ("{server}?toc_library=sqlite:///{library}", 2),
        ("{server}", None),
        ("{server}?toc_library=sqlite:////dev/null/library.db", None),
    ],
    ids=["library", "none", "broken"],
)
def test_what_is_in_the_library_only_is_told_with_the_counts(
    server: Server, library: Path, url: str, far: int | None
) -> None:
    with HttpServer(url.format(server=server.toc_url, library=library)) as api:
        with server.client() as client:
            TimeoutCenter(client).put("near", "one", b"x", delay=60)
        one = {"ready": 0, "scheduled": 1, "inFlight": 0, "dead": 0}
        assert api.get("/v1/queues/far/counts").json == {**one, "far": far}
        assert api.get("/v1/queues/far").json["counts"] == {**one, "far": far}
        assert api.get("/v1/queues/near/counts").json == one
        assert api.get("/v1/queues/near").json["counts"] == one
        if "toc_library" in url:
            said = "not counted here: 2 of far." if far else "cannot be asked what there is of far."
            while said not in api.get("/page/").body.decode():
                time.sleep(0.1)  # a look may take some time; the test's time is bounded
        else:
            assert "horizon" not in api.get("/page/").body.decode()


async def test_nobody_waits_for_a_library_that_does_not_answer() -> None:
    class Center:
        asked = 0

        @property
        def queues(self) -> Center:
            return self

        async def call(self, _: Any) -> list[str]:
            return ["mail"]

        async def count_far(self) -> dict[str, int]:
            self.asked += 1
            if self.asked == 2:
                raise LibraryError("it is away")
            await asyncio.sleep(0 if self.asked == 1 else 3600)
            return {"mail": 7}

    class Api:
        has_library, center = True, Center()

    class Soon(FarAhead):
        EVERY = SHARE = 0.0

    far = Soon(Api())
    assert await far.read() == {"mail": 7}
    await far.read()  # which begins the next look
    while far.task:
        await asyncio.sleep(0)
    assert await far.read() == {"mail": None}
    for _ in range(5):
        assert await far.read() == {"mail": None}
    while Api.center.asked < 3:
        await asyncio.sleep(0)
    await far.aclose()


def test_no_request_walks_over_keys_or_reads_more_than_a_page(tmp_path: Path) -> None:
    own = Server(tmp_path).start()  # nobody else's commands are counted
    views = (
        *("/v1/queues", "/v1/queues/mail", "/v1/queues/mail/counts?within=300", "/scale/mail"),
        *("/v1/queues/mail/tasks?limit=20", "/v1/queues/mail/tasks?state=waiting&limit=20"),
        *("/v1/queues/mail/tasks/m1", "/v1/queues/gone/dead?limit=20", "/v1/queues/mail/limits"),
        *("/metrics", "/page/", "/page/queue?queue=mail", "/page/limits"),
    )
    with own.client() as client, HttpServer(own.toc_url) as api:
        center = TimeoutCenter(client, grace=0)
        center.queues.declare("mail", concurrency=5, key_concurrency=1)

        def fill(since: int, until: int) -> None:
            center.put_many(
                "mail",
                [
                    {"id": f"m{n}", "body": b"x", "delay": 3600 + n, "key": str(n % 100)}
                    for n in range(since, until)
                ],
            )
            center.put_many("gone", [(f"d{n}", b"x") for n in range(since, until, 6)])
            while popped := center.pop("gone", 1000).messages:
                for one in popped:
                    center.reject(one, requeue=False)

        def look() -> int:
            """Bytes that the server has sent for all of it."""
            for view in views:
                assert api.get(view).status == 200, view
            before = client.info("stats")["total_net_output_bytes"]
            for view in views:
                assert api.get(view).status == 200, view
            return int(client.info("stats")["total_net_output_bytes"] - before)

        fill(0, 200)
        few = look()
        fill(200, 2000)
        many = look()
        assert many < 2 * few  # of ten times as many messages
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    own.stop()
    assert used.isdisjoint({"keys", "scan", "hscan", "sscan", "zscan"})
