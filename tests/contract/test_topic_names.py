"""The names of topics, page by page: as many as there are, however many others there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from kombu_toc import TimeoutCenter

from ..support.http_server import HttpServer
from ..support.servers import Server

NAMES = sorted(["", "a", "a b", "a%b", "ab", "b{c}", "täsk", "z\0z", "\U0001f600", "~", "A*", "a?"])


def every(center: TimeoutCenter, prefix: str = "", limit: int = 3) -> list[str]:
    """All names, in pages."""
    found: list[str] = []
    after = ""
    while page := center.queues.names(prefix=prefix, after=after, limit=limit):
        assert len(page) <= limit
        found += page
        after = page[-1]
        if len(page) < limit:
            break
    return found


def kept(client: redis.Redis) -> list[str]:
    """What is kept of the names, without anybody having read them."""
    return [name.decode() for name in client.zrange("toc:{toc}:names", 0, -1)]


def test_pages_have_every_name_once_in_order(center: TimeoutCenter, client: redis.Redis) -> None:
    for name in reversed(NAMES[1:]):
        center.queues.declare(name)
    assert kept(client) == NAMES[1:]
    assert every(center) == NAMES[1:] == center.queues.names()
    assert every(center, "a") == ["a", "a b", "a%b", "a?", "ab"]
    assert every(center, "a b") == ["a b"]
    assert every(center, "c") == []
    assert center.queues.names(prefix="a", after="a%b", limit=10) == ["a?", "ab"]
    assert center.queues.names(prefix="a", after="b", limit=10) == []
    assert center.queues.names(prefix="b", after="a", limit=10) == ["b{c}"]
    # Without a limit, too.
    assert center.queues.names(prefix="a", after="a b") == ["a%b", "a?", "ab"]
    center.queues.delete("a%b")
    center.queues.delete("täsk")
    assert kept(client) == center.queues.names()
    assert every(center) == [one for one in NAMES[1:] if one not in ("a%b", "täsk")]
    assert every(center) == center.queues.names()


@pytest.mark.one_server("its commands are counted")
def test_a_page_of_queues_costs_no_more_of_many_queues(tmp_path: Path) -> None:
    own = Server(tmp_path).start()  # nobody else's commands are counted
    with own.client() as client, HttpServer(own.toc_url) as api:
        center = TimeoutCenter(client)

        def look() -> int:
            """Bytes that the server has sent for a page."""
            api.get("/v1/queues?limit=20")
            before = client.info("stats")["total_net_output_bytes"]
            assert len(api.get("/v1/queues?limit=20").json["queues"]) == 20
            return int(client.info("stats")["total_net_output_bytes"] - before)

        for number in range(30):
            center.queues.declare(f"queue-{number:05}")
        few = look()
        for number in range(30, 1000):
            center.queues.declare(f"queue-{number:05}")
        assert look() < 1.5 * few
        client.config_resetstat()
        names, after = [], ""
        while after is not None:
            more = f"&after={after}" if after else ""
            page = api.get(f"/v1/queues?limit=200{more}").json
            names += [one["name"] for one in page["queues"]]
            after = page["nextPageToken"]
        assert names == [f"queue-{number:05}" for number in range(1000)]
        used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    own.stop()
    assert used.isdisjoint({"hkeys", "hgetall", "hscan", "keys", "scan", "zscan"})
