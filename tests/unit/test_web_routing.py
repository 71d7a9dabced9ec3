"""Which queue a task of Celery goes to that is sent over HTTP: the token must be of that one."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_toc.web.operations import queue_of
from kombu_toc.http import Problem

from ..support.cases import each

pytestmark = pytest.mark.versions


def app(**conf: Any) -> Celery:
    made = Celery("shop", broker="memory://", set_as_current=False)
    made.conf.update(conf)
    return made


ROUTES = {
    "a": {"queue": "mail"},
    "b": {"exchange": "news", "routing_key": "all"},
    "c": {"queue": "mail", "exchange": "news", "routing_key": "all"},
    "d": {"routing_key": "all"},
    "e": {"queue": "topics"},
    "f": {"queue": "topics", "routing_key": "all"},
    "g": {"queue": "mail", "exchange_type": "fanout"},
}


@each(
    "task, options, found",
    [
        ("a", {}, ("mail", True)),
        ("other", {}, ("celery", True)),
        ("other", {"queue": "sms"}, ("sms", True)),
        ("a", {"queue": "sms"}, ("sms", True)),
        ("b", {}, ("all", False)),
        ("b", {"queue": "sms"}, ("all", False)),
        ("c", {}, ("all", False)),
        ("d", {}, ("celery", True)),
        ("e", {}, ("events", False)),
        ("f", {}, ("all", False)),
        ("g", {}, ("celery", False)),
    ],
)
def test_what_an_exchange_passes_on_is_of_no_single_queue(
    task: str, options: dict[str, Any], found: tuple[str, bool]
) -> None:
    topics = Queue("topics", Exchange("events", type="topic"), routing_key="events")
    shop = app(task_routes=ROUTES, task_queues=[Queue("celery"), Queue("mail"), topics])
    assert queue_of(shop, task, [], {}, options) == found


# Celery advises against it.
@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
def test_what_a_task_says_itself_counts() -> None:
    shop = app()

    @shop.task(name="one", exchange="news", routing_key="all")
    def one() -> None: ...

    @shop.task(name="two", queue="mail")
    def two() -> None: ...

    shop.finalize()
    assert queue_of(shop, "one", [], {}, {}) == ("all", False)
    assert queue_of(shop, "two", [], {}, {}) == ("mail", True)


def test_a_queue_that_there_is_not_is_refused() -> None:
    shop = app(task_create_missing_queues=False, task_queues=[Queue("celery")])
    with pytest.raises(Problem) as caught:
        queue_of(shop, "one", [], {}, {"queue": "nowhere"})
    assert caught.value.field == "queue"
