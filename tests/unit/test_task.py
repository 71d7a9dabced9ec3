"""A message of a timeout center, read as a task: only what the app accepts is decoded."""

from __future__ import annotations

import pickle
from datetime import datetime, timezone

import pytest
from celery import Celery
from kombu import compression, serialization

from celery_toc import Task
from kombu_toc import DEAD, WAITING, Found
from kombu_toc.model import scores
from kombu_toc.model.envelope import pack

ARGS, KWARGS = [1, "zwei"], {"shop": "a"}


def task(app, *, protocol=2, serializer="json", compress=None, deflate=True, state=WAITING, **sent):
    """What is found of a task that was sent."""
    app.conf.task_protocol = protocol
    message = app.amqp.create_task_message("id-1", "shop.remind", ARGS, KWARGS, **sent)
    headers, properties = dict(message.headers), dict(message.properties)
    content_type, encoding, body = serialization.dumps(message.body, serializer=serializer)
    if compress:
        if isinstance(body, str):
            body = body.encode()
        body, headers["compression"] = compression.compress(body, compress)
    packed = pack(
        {
            "headers": headers,
            "properties": properties,
            "content-type": content_type,
            "content-encoding": encoding,
            "body": body,
        },
        deflate=deflate,
        id="id-1",
    )
    score = scores.action(2_000_000_000_000_000) if state == WAITING else scores.lease(5, 0, 3)
    return Task(app, Found("mail", 3, "id-1#00c0ffee", state, 0, score, packed, ""))


@pytest.fixture
def app():
    with Celery(broker="toc+redis://127.0.0.1:1/0", set_as_current=False) as made:
        yield made


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("compress", [None, "gzip"])
@pytest.mark.parametrize("deflate", [True, False])
def test_a_task_is_read_as_it_was_sent(app, protocol, compress, deflate):
    read = task(app, protocol=protocol, compress=compress, deflate=deflate, retries=2)
    assert (read.id, read.name, read.retries) == ("id-1", "shop.remind", 2)
    assert (list(read.args), read.kwargs) == (ARGS, KWARGS)
    assert read.problem == ""
    assert read.eta == datetime.fromtimestamp(2e9, timezone.utc)


def test_what_is_not_waiting_has_no_time_to_come(app):
    assert task(app, state=DEAD).eta is None


def test_what_else_is_sent_along_is_read_too(app):
    read = task(app, chord=app.signature("x"), stamped_headers=["order"], order=["7"], eta="soon")
    assert read.embedded["chord"]["task"] == "x"
    assert read.stamps == {"order": ["7"]}


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def test_what_the_app_does_not_accept_is_not_decoded(app):
    """As in a worker; what the sender wrote of the arguments is shown instead."""
    read = task(app)
    read.content_type, read.content_encoding = "application/x-python-serialize", "binary"
    read.body = pickle.dumps(Bomb())
    assert read.args == "[1, 'zwei']"
    assert read.kwargs == "{'shop': 'a'}"
    assert "ContentDisallowed" in read.problem
    assert read.embedded == {}


def test_what_the_app_accepts_is(app):
    app.conf.accept_content = ["pickle"]
    read = task(app, serializer="pickle")
    assert list(read.args) == ARGS


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"", "unknown envelope"), (b"\x07x", "unknown envelope"), (b"{}\nx", "damaged envelope")],
)
def test_what_cannot_be_read_says_why_and_is_still_shown(app, body, said):
    read = Task(app, Found("mail", 0, "id-2", WAITING, 0, 16, body, ""))
    assert (read.id, read.name, read.args, read.kwargs, read.retries) == ("id-2", *[None] * 3, 0)
    assert said in read.problem
    assert read.stamps == {}
    assert "id-2" in repr(read)


def test_a_message_that_is_no_task_is_shown_as_it_is(app):
    packed = pack(
        {"headers": {}, "properties": {}, "content-type": None, "body": b"hello"}, deflate=False
    )
    read = Task(app, Found("mail", 0, "id-3", WAITING, 0, 16, packed, ""))
    assert (read.id, read.name, read.body) == ("id-3", None, b"hello")
