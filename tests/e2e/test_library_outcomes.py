"""How tasks end, as the library has it: each outcome by its name, in rows, in Python and at the
command line; and what has failed is sent again, each once."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

import pytest
import redis

import celery_toc

from ..support import nursery
from ..support.commands import answer
from ..support.library import on_engines, statuses
from ..support.workers import POOLS, Live, wait_until
from .test_cli import CELERY


@pytest.fixture
def options(library_url: str) -> dict[str, Any]:
    return {"broker_transport_options": {"toc_library": library_url}}


@on_engines("sqlite", "postgresql", "mariadb")
@pytest.mark.parametrize("pool", list(POOLS))
def test_each_outcome_has_a_name_of_its_own(live: Live, options: dict[str, Any], pool: str) -> None:
    """Whether a task is acknowledged when it begins or when it has ended, and however long it
    takes."""
    live.app.conf.update(options)
    library = celery_toc.timeout_center(live.app).library
    tasks = live.app.tasks
    headers = celery_toc.biz("order", 42)
    revoked = tasks["e2e.add"].apply_async((1, 2), countdown=3600, headers=headers)
    assert statuses(library, revoked.id) == ["pending"]
    live.start_workers(1, *POOLS[pool], **options)
    expected = {
        "short": (tasks["e2e.add"].delay(1, 2), ["succeeded"]),
        "long": (tasks["e2e.nap"].delay("long", 1.5), ["succeeded"]),
        "long, late": (tasks["e2e.late_ack"].delay("late", 1.5), ["succeeded"]),
        "failed": (tasks["e2e.fail"].delay("disk full"), ["failed"]),
        "failed, late": (tasks["e2e.fail_late"].delay("disk full"), ["failed"]),
        "tried": (tasks["e2e.fail_again"].delay("thrice"), ["retried", "retried", "failed"]),
        "dead": (tasks["e2e.fail_kept"].delay("disk full"), ["dead"]),
        "refused": (tasks["e2e.refuse"].delay("no"), ["dead"]),
        "expired": (tasks["e2e.add"].apply_async((1, 2), expires=-5), ["expired"]),
        "revoked": (revoked, ["revoked"]),
        "cancelled": (tasks["e2e.add"].apply_async((1, 2), countdown=3600), ["cancelled"]),
        "ignored": (tasks["e2e.ignore"].delay(), ["done"]),
    }
    revoked.revoke()
    celery_toc.timeout_center(live.app).cancel(expected["cancelled"][0].id)
    wait_until(
        lambda: all(statuses(library, one.id) == wanted for one, wanted in expected.values()),
        what=lambda: {name: statuses(library, one.id) for name, (one, _) in expected.items()},
        seconds=30,
    )
    for name in ("failed", "failed, late", "dead"):
        [record] = library.history(expected[name][0].id)
        assert record.error.splitlines()[0] == "ValueError: disk full"
        assert "raise ValueError(text)" in record.error, record.error
        assert record.worker or name == "dead"
    [found] = library.find(biz_id="42", biz_type="order").records
    assert (found.id, found.status) == (revoked.id, "revoked")


@on_engines("sqlite", "postgresql", "mariadb")
@pytest.mark.parametrize("mode", ["through", pytest.param("behind", marks=pytest.mark.nightly)])
def test_what_has_failed_is_found_shown_and_sent_again_each_once(
    live: Live, log_url: str, library_url: str, options: dict[str, Any], mode: str
) -> None:
    """Also if three do it at the same time."""
    options["broker_transport_options"]["toc_topics"] = {"celery": {"library": mode}}
    live.app.conf.update(options)
    library = celery_toc.timeout_center(live.app).library
    live.start_workers(2, "-c", "2", **options)
    sent = {}
    for number in range(15):
        kind = ("flaky", "flaky_late", "flaky_kept")[number % 3]
        headers = celery_toc.biz("order", number, shop=("berlin", "graz")[number % 2])
        # Of some it is recorded that they were acknowledged before they fail; of others not.
        sent[f"{kind}-{number}"] = live.app.tasks[f"e2e.{kind}"].apply_async(
            (f"{kind}-{number}", 1.2 if number < 3 else 0),
            headers=headers,
            # What is sent again does not expire; a dead letter is put back as it was.
            expires=None if kind == "flaky_kept" else 8,
        )
    sent_at = time.monotonic()
    wait_until(
        lambda: len(library.find(status=("failed", "dead")).records) == 15,
        what=lambda: library.find().records,
        seconds=30,
    )
    assert len(library.find(status="dead").records) == 5

    listed = answer(live.app, "find", "--failed", "--attribute", "shop=graz", "--task", "e2e.flaky")
    assert listed.code == 0 and "Traceback" not in listed.out
    assert sum("is broken" in line for line in listed.out.splitlines()) == 2
    shown = answer(live.app, "show", sent["flaky-0"].id)
    assert shown.code == 0 and "flaky-0 is broken" in shown.out
    assert 'raise ValueError(f"{name} is broken")' in shown.out
    assert "attributes.shop" in shown.out

    time.sleep(max(sent_at + 8 - time.monotonic(), 0))  # until they have expired
    with redis.Redis.from_url(log_url) as log:
        log.set("mended", 1)
    only = answer(
        live.app, "find", "--failed", "--task", "e2e.flaky", "-n", "1", "--retry", "-y", "--json"
    )
    assert only.json == {"retried": 1, "not_kept": 0}
    url = f"{live.server.toc_url}?toc_library=env:SHOP_LIBRARY"
    env = {**os.environ, "SHOP_LIBRARY": library_url}
    words = [CELERY, "-b", url, "toc", "find", "--failed", "--retry", "--yes", "--json"]
    running = [nursery.Popen(words, stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)]
    counts = [json.loads(one.communicate(timeout=60)[0])["retried"] for one in running]
    assert sum(counts) == 14, counts
    live.journal.wait_for("flaky", 15)
    ended = {name: (["retried", "succeeded"], ["succeeded"])["kept" in name] for name in sent}
    wait_until(
        lambda: {name: statuses(library, one.id) for name, one in sent.items()} == ended,
        what=lambda: {name: statuses(library, one.id) for name, one in sent.items()},
    )
    again = answer(live.app, "find", "--failed", "--retry", "--yes", "--json")
    assert again.json == {"retried": 0, "not_kept": 0}
    assert len(live.journal.entries("flaky")) == 15
    found = library.find(attributes={"shop": "berlin"}, biz_type="order", status="succeeded")
    assert len(found.records) == 8
    assert found.records[0].attributes == {"shop": "berlin"}
    assert not library.find(attributes={"shop": "Berlin"}).records
    assert not library.find(attributes={"shop": "berlin", "till": "2"}).records
