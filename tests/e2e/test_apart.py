"""Several apps on one server: by prefix or by database, none sees what is another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from ..support.commands import answer
from ..support.nodes import Worker
from ..support.servers import Server
from ..support.tasks import make_app
from ..support.workers import Live


def by_prefix(server: Server, name: str) -> tuple[str, dict[str, Any]]:
    return server.toc_url, {"broker_transport_options": {"global_keyprefix": f"{name}:"}}


def by_database(server: Server, name: str) -> tuple[str, dict[str, Any]]:
    number = {"shop": 5, "bank": 6}[name]
    return f"{server.toc_url.removesuffix('/0')}/{number}", {}


@pytest.mark.parametrize("apart", [by_prefix, pytest.param(by_database, marks=pytest.mark.nightly)])
def test_two_apps_on_one_server_never_see_each_others_tasks_broadcasts_or_lists(
    apart: Callable[..., tuple[str, dict[str, Any]]], live: Live
) -> None:
    apps: dict[str, Celery] = {}
    workers: dict[str, Worker] = {}
    for name in ("shop", "bank"):
        url, settings = apart(live.server, name)
        apps[name] = make_app(url, "disabled://", **settings)
        [workers[name]] = live.start_workers(1, "-P", "solo", mingle=True, broker=url, **settings)
    sent = {}
    for name, app in apps.items():
        for i in range(20):
            app.tasks["e2e.told"].apply_async((f"{name}-{i}",), countdown=i % 3 * 0.2)
        app.tasks["e2e.told"].apply_async((f"{name}-all",), queue="everyone", exchange="everyone")
        sent[name] = app.tasks["e2e.note"].apply_async(("later",), countdown=3600).id
    for name in apps:
        # Each is written down twice: when it begins and when it is done.
        entries = live.journal.wait_for(f"{name}-", 42)
        begun = [entry for entry in entries if "worker" in entry]
        assert {entry["worker"] for entry in begun} == {workers[name].hostname()}
        assert len(begun) == 21
    for name, app in apps.items():
        pongs = app.control.ping(timeout=2)
        assert [next(iter(pong)) for pong in pongs] == [workers[name].hostname()]
        listed = answer(app, "list", "--json").json["messages"]
        assert [message["id"] for message in listed] == [sent[name]]
        other = sent["bank" if name == "shop" else "shop"]
        assert answer(app, "show", other).code == 3
        assert answer(app, "cancel", other, "--yes").code == 3
    for app in apps.values():
        app.close()
