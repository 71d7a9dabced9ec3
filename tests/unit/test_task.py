"""A message of a timeout center, read as a task: nothing of it runs unless the caller says so."""

from __future__ import annotations

import json
import pickle
import sys
from datetime import datetime, timezone

import pytest
from celery import Celery
from kombu import compression, serialization
from kombu.utils import json as kombu_json

from celery_toc import Task
from kombu_toc import DEAD, WAITING, EnvelopeError, Found, look, read_content
from kombu_toc.model import scores
from kombu_toc.model.message import pack

from ..support.cases import each

JSON = "application/json"

ARGS, KWARGS = [1, "zwei"], {"shop": "a"}


def task(app, *, protocol=2, serializer="json", compress=None, deflate=True, state=WAITING, **sent):
    """What is found of a task that was sent."""
    app.conf.task_protocol = protocol
    how = {name: sent.pop(name) for name in ("decode",) if name in sent}
    args, more = sent.pop("args", ARGS), sent.pop("headers", {})
    message = app.amqp.create_task_message("id-1", "shop.remind", args, KWARGS, **sent)
    headers, properties = {**message.headers, **more}, dict(message.properties)
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
    return Task(app, Found("mail", 3, "id-1#00c0ffee", state, 0, score, packed, ""), **how)


@pytest.fixture
def app():
    with Celery(broker="toc+redis://127.0.0.1:1/0", set_as_current=False) as made:
        yield made


@pytest.mark.versions
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


@pytest.mark.versions
def test_what_else_is_sent_along_is_read_too(app):
    read = task(app, chord=app.signature("x"), stamped_headers=["order"], order=["7"], eta="soon")
    assert read.embedded["chord"]["task"] == "x"
    assert read.stamps == {"order": ["7"]}


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def test_what_the_app_does_not_accept_is_not_decoded(app):
    """Asked as a worker; what the sender wrote of the arguments is shown instead."""
    read = task(app, decode="app")
    read.content_type, read.content_encoding = "application/x-python-serialize", "binary"
    read.body = pickle.dumps(Bomb())
    assert read.args == "[1, 'zwei']"
    assert read.kwargs == "{'shop': 'a'}"
    assert "ContentDisallowed" in read.problem
    assert read.embedded == {}


@pytest.mark.versions
def test_what_the_app_accepts_is_decoded_as_the_app_would_only_if_it_is_asked_for(app):
    app.conf.accept_content = ["pickle"]
    assert list(task(app, serializer="pickle", decode="app").args) == ARGS
    read = task(app, serializer="pickle")
    assert (read.args, read.kwargs) == ("[1, 'zwei']", "{'shop': 'a'}")
    assert "bytes of application/x-python-serialize; only JSON" in read.problem
    with pytest.raises(ValueError, match="'safe' or 'app', not 'pickle'"):
        task(app, decode="pickle")


def test_msgpack_is_read_if_it_is_installed(app):
    pytest.importorskip("msgpack")
    read = task(app, serializer="msgpack", compress="gzip")
    assert (list(read.args), read.kwargs, read.problem) == (ARGS, KWARGS, "")


@pytest.mark.versions
def test_types_that_an_app_has_registered_stay_as_they_were_sent(app):
    """Their decoders are the app's code."""
    moment = datetime(2030, 1, 1, tzinfo=timezone.utc)
    kombu_json.register_type(Bomb, "bomb", lambda bomb: "x", lambda x: pytest.fail("it was run"))
    try:
        read = task(app, args=[moment, Bomb()], headers={"x-a": Bomb()})
    finally:
        kombu_json._decoders.pop("bomb"), kombu_json._encoders.pop(Bomb)
    sent = {"__type__": "bomb", "__value__": "x"}
    assert (read.args, read.headers["x-a"], read.problem) == ([moment, sent], sent, "")


BODY = json.dumps([ARGS, KWARGS, {}]).encode()


@each("name", ["gzip", "bzip2", "lzma", "zstd"])
def test_a_body_is_expanded_to_a_bound_in_one_stream(name):
    try:
        small, kind = compression.compress(BODY, name)
    except KeyError:
        pytest.skip(f"{name} is not installed")

    def read(body, most=10_000):
        parts = {"headers": {"compression": kind}, "body": body, "content-type": JSON}
        return read_content(parts, most)

    assert (read(small).value, read(small).size) == ([ARGS, KWARGS, {}], len(BODY))
    assert read(small, len(BODY)).problem == ""
    for body, most, said in (
        (small, len(BODY) - 1, "expand to, more than the"),
        (compression.compress(BODY + b" " * 5_000_000, name)[0], 10_000, "expand to, more than"),
        (small[:-6], 10_000, "damaged bytes"),
        (small + small, 10_000, "damaged bytes"),  # a worker would read both
        (b"x" * 100, 10_000, "cannot be read as application/json"),
    ):
        if name == "gzip" and body == small[:-6]:
            continue  # its end is a checksum
        found = read(body, most)
        assert found.value is None and said in found.problem, (body[:20], most)
        assert found.size <= most + 1


@each("name", ["application/x-brotli", "x", ["gzip"], 7])
def test_what_nothing_bounds_is_not_expanded(name):
    found = read_content({"headers": {"compression": name}, "body": b"x" * 9, "content-type": JSON})
    assert (found.value, found.size) == (None, 0)
    assert "9 bytes, compressed as" in found.problem


@each(
    ("body", "said"),
    [
        (b"[" * 101 + b"]" * 101, "deeper than 100 levels"),
        (b"[" * 100_000, "RecursionError"),
        (b"1" * 5000, "cannot be read" if sys.version_info >= (3, 11) else ""),
        (b"\xff", "UnicodeDecodeError"),
        (b'{"__type__": ["a"], "__value__": 1}', "TypeError"),
        (b" " * (1 << 20) + b"1", "1,048,577 bytes are"),
    ],
)
def test_a_body_that_cannot_be_shown_says_why(body, said):
    found = read_content({"headers": {}, "body": body, "content-type": JSON})
    assert said in found.problem


def test_headers_are_read_of_what_is_too_large_and_bounded_themselves():
    parts = {"headers": {"task": "a"}, "properties": {}, "content-type": JSON}
    large = pack({**parts, "body": b" " * 5_000_000}, deflate=True, id="one")
    message, problem = look(large, "one")
    assert (message["headers"], message["body"]) == ({"task": "a"}, b"")
    assert "expand to, more than the 1,048,576" in problem
    deep: list = []
    for _ in range(200):
        deep = [deep]
    for headers, said in (({"a": "x" * 2_000_000}, "more than"), ({"a": deep}, "deeper than")):
        for deflate in (False, True):
            with pytest.raises(EnvelopeError, match=f"its headers .*{said}"):
                look(pack({**parts, "headers": headers, "body": b""}, deflate=deflate))


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
