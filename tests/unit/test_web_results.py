"""Results of tasks as the HTTP API shows them, of backends that keep them in different ways."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_toc.web.operations import Allowed


def app_with(backend: str, **settings: Any) -> Celery:
    app = Celery("shop", broker="memory://", backend=backend, set_as_current=False)
    app.conf.update(settings)
    return app


def shown(app: Celery, id: str) -> Any:
    return asyncio.run(Allowed(app, ()).result(id))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: a process of Celery 5.3 makes the tables of its first database only."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.versions
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Bogota"])
@pytest.mark.parametrize("kind", ["sql", "file"])
def test_the_time_of_a_result_is_in_utc_whatever_the_backend_keeps(
    folder: Path, kind: str, zone: str
) -> None:
    if kind == "sql":
        pytest.importorskip("sqlalchemy")
    backend = f"db+sqlite:///{folder}/results" if kind == "sql" else f"file://{folder}"
    app, id = app_with(backend, timezone=zone), f"order-{kind}-{zone.replace('/', '-')}"
    before = datetime.now(timezone.utc)
    app.backend.store_result(id, 7, "SUCCESS")
    told = shown(app, id)
    assert (told["state"], told["result"]) == ("SUCCESS", 7)
    assert told["doneTime"].endswith("Z")
    done = datetime.fromisoformat(told["doneTime"].replace("Z", "+00:00"))
    assert before - timedelta(seconds=1) <= done <= datetime.now(timezone.utc)


_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)


@pytest.mark.parametrize(
    "value, said",
    [
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (_CIRCLE, "[[...]]"),
        ({"at": timedelta(1)}, {"at": "datetime.timedelta(days=1)"}),
    ],
    ids=["key", "circle", "value"],
)
def test_a_result_that_json_has_no_form_for_is_shown_as_python_writes_it(
    tmp_path: Path, value: Any, said: Any
) -> None:
    app = app_with(
        f"file://{tmp_path}", result_serializer="pickle", result_accept_content=["pickle"]
    )
    app.backend.store_result("order-7", value, "SUCCESS")
    assert shown(app, "order-7")["result"] == said
