"""The page: what is done to all that match, also of what is in the task library only."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_toc.http import api_for
from kombu_toc.http.page.jobs import Selection

from ..engines.test_library_far import asked, load, queue, send, time_passes
from ..support.library import broker, engine, new_url, options, store
from .test_page_jobs import counted, over

pytestmark = pytest.mark.usefixtures("client")

__all__ = ("asked", "broker", "engine", "load", "new_url", "options", "queue", "store")  # fixtures


async def test_it_is_done_to_what_is_far_ahead_and_loaded_meanwhile(
    server: Any, queue: Any, store: Any, asked: Any, load: Any, options: Any
) -> None:
    ids = [f"far-{n}" for n in range(20)]
    for id in ids:
        send(queue, id)
    time_passes(store, *ids[:5], until_due=60)

    api = api_for(server.toc_url, **options)
    jobs = api.page.tools.jobs
    job = await counted(jobs, "cancel", Selection("mail"))
    assert job.matching == 20
    assert load() == 5
    await jobs.confirm(job.id, "anna")
    done = await over(jobs, job.id)
    assert (done.phase, done.number, done.late) == ("done", 20, 0)
    await api.aclose()
    assert not asked.get(ids)
