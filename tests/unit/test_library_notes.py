"""What consumers note for the task library, until it is looked at: in which order it counts,
whoever notes it at the same time, and what is left of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_toc.library import recorder, statuses
from kombu_toc.library.recorder import Gathering
from kombu_toc.library.records import BIZ_ID, BIZ_TYPE, Event, texts_of
from kombu_toc.model import scores
from kombu_toc.model.topic import Declaration, Topic

MODES = {"mail": "behind", "plain": None, "off": "off"}


def known(name: str) -> Topic | None:
    if name == "reply":
        return Topic(name, Declaration(expires=1000), "toc")
    return Topic(name, Declaration(library=MODES[name]), "toc") if name in MODES else None


def end(
    id: Any,
    queue: str = "mail",
    *,
    token: str | None = "t",
    own: str = "own",
    at_ns: int = 5_000,
    score: int = scores.action(7_000_000),
    error: str = "",
    task: Any = "remind",
    kind: Any = None,
    biz: Any = None,
) -> recorder.End:
    """What a consumer notes of a message that it has acknowledged."""
    told = (task, kind, biz, None, "done", None)
    return (id, token, own, queue, at_ns, score, 3, error, *told)


class Consumer:
    """Has taken what is in `delivered`; `meanwhile` happens while it is asked."""

    def __init__(self, gathering: Gathering) -> None:
        self.gathering = gathering
        self.delivered: dict[int, str] = {}
        self.meanwhile: Callable[[], Any] = lambda: None
        self.notes = gathering.notes_of(self, known)

    def take(self, tag: int) -> None:
        self.delivered[tag] = f"order-{tag}"
        self.notes.fresh[tag] = 1000 * tag

    def ack(self, tag: int) -> None:
        id = self.delivered.pop(tag)
        self.notes.fresh.pop(tag, None)
        self.notes.ended[tag] = end(id)

    def taken(self, tag: int, at_us: int) -> Event | None:
        id = self.delivered.get(tag)
        if id is None:
            return None
        event = self.gathering.event_of((id, "t", "mail"), statuses.TAKEN, at_us=at_us, attempts=1)
        self.meanwhile()
        return event


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def gathering(lost) -> Gathering:
    store: Any = SimpleNamespace(shards=SimpleNamespace(of_key=None))  # nothing is written
    return Gathering(store, lost.append, "w:1")


@pytest.fixture
def consumer(gathering) -> Consumer:
    return Consumer(gathering)


def statuses_of(gathering: Gathering) -> dict[str, str]:
    return {key[0]: statuses.NAMES[one.status] for key, one in gathering._events.items.items()}


def test_what_is_acknowledged_before_anybody_looks_was_never_taken(consumer, gathering) -> None:
    consumer.take(1)
    consumer.take(2)
    consumer.ack(1)
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "done", "order-2": "taken"}
    assert gathering._events.items["order-2", "t", "mail"].at_us == 2
    assert list(gathering._taken) == [("order-2", "t", "mail")]
    consumer.ack(2)
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "done", "order-2": "done"}
    assert gathering._taken == {}


def test_what_is_acknowledged_while_somebody_looks_is_done(consumer, gathering) -> None:
    consumer.take(1)
    consumer.meanwhile = lambda: consumer.ack(1)
    gathering.look()
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "done"}
    assert gathering._taken == {}


@pytest.mark.parametrize("status", [statuses.PENDING, statuses.DEAD])
def test_what_is_given_back_while_somebody_looks_is_not_taken(consumer, gathering, status) -> None:
    def give_back() -> None:
        consumer.delivered.pop(1)
        event = gathering.event_of(("order-1", "t", "mail"), status)
        other.append(threading.Thread(target=gathering.add, args=(event,)))
        other[0].start()

    other: list[threading.Thread] = []
    consumer.take(1)
    consumer.meanwhile = give_back
    gathering.look()
    other[0].join()
    assert statuses_of(gathering) == {"order-1": statuses.NAMES[status]}
    assert gathering._taken == {}


def test_what_dies_after_it_was_acknowledged_is_dead(consumer, gathering) -> None:
    consumer.take(1)
    consumer.ack(1)
    gathering.add(gathering.event_of(("order-1", "t", "mail"), statuses.DEAD))
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "dead"}


def test_what_was_given_back_and_comes_again_has_its_last_status(consumer, gathering) -> None:
    consumer.take(1)
    consumer.delivered.pop(1)
    gathering.add(gathering.event_of(("order-1", "t", "mail"), statuses.PENDING))
    consumer.delivered[2] = "order-1"
    consumer.notes.fresh[2] = 9_000
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "taken"}
    consumer.ack(2)
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "done"}


def test_an_end_says_what_is_known_of_its_message(consumer, gathering) -> None:
    tried = scores.tried(7_000, 1)
    ends = [
        end("order-1", at_ns=5_000_999, kind="order", biz=42),
        end("order-2", "plain", error="no \0 file", score=tried, task=None),
        end("order-3", "unknown", task=["no name"]),
        end(None, own="kept-4", token=None),
        end("order-5", "off"),
        end("order-6", "reply"),
        end("x" * 256),
    ]
    consumer.notes.ended.update(enumerate(ends))
    gathering.look()
    found = {event.key: event for event in gathering._events.items.values()}
    assert list(found) == [
        ("order-1", "t", "mail"),
        ("order-2", "t", "plain"),
        ("order-3", "t", "unknown"),
        ("kept-4", "", "mail"),
    ]
    first, second, third, _ = found.values()
    said = {"task": "remind", BIZ_TYPE: "order", BIZ_ID: 42}
    assert first[1:] == (statuses.DONE, 5000, 1, "w:1", "", (said, 7_000_000), False, None)
    assert (second.attempts, second.error, second.has_row) == (3, "no \ufffd file", True)
    assert second.message == ({}, 7_000_000)
    assert texts_of(third.message[0])[0] is None and third.has_row


def test_what_was_noted_is_written_when_its_consumer_is_gone(gathering) -> None:
    consumer = Consumer(gathering)
    consumer.take(1)
    consumer.take(2)
    consumer.ack(1)
    del consumer
    gc.collect()
    another = Consumer(gathering)  # which leaves what the first has noted
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "done"}
    del another
    Consumer(gathering)
    assert len(gathering._all) == 1


def test_what_a_consumer_notes_is_bounded_if_nobody_writes(
    consumer, gathering, lost, monkeypatch
) -> None:
    monkeypatch.setattr(recorder, "MOST", 20)
    gathering._events._most = 50
    for tag in range(1, 201):
        consumer.take(tag)
        consumer.ack(tag)
        gathering.bound(consumer.notes)
        assert len(consumer.notes.ended) < 20
    assert consumer.notes.fresh == {}
    assert len(gathering) == 50 and lost == ["mail"] * 150
    assert list(statuses_of(gathering))[-1] == "order-200"


def test_a_child_has_noted_nothing(consumer, gathering) -> None:
    consumer.take(1)
    consumer.take(2)
    consumer.ack(1)
    gathering._lock.acquire()  # as a thread of the parent's may have at that moment
    gathering.begin("w:2")
    gathering.look()
    assert len(gathering) == 0
    consumer.ack(2)
    gathering.look()
    [event] = gathering._events.items.values()
    assert (event.key[0], event.worker) == ("order-2", "w:2")


def test_what_is_noted_while_ends_are_read_is_read_the_next_time(consumer, gathering) -> None:
    class Ends(dict[int, Any]):
        def pop(self, tag: int, *rest: Any) -> Any:
            found = super().pop(tag, *rest)
            self[tag + 1] = end(f"order-{tag + 1}")
            return found

    consumer.notes.ended = Ends({1: end("order-1")})
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "done"}
    consumer.notes.ended = dict(consumer.notes.ended)
    gathering.look()
    assert statuses_of(gathering) == {"order-1": "done", "order-2": "done"}


def test_nothing_that_is_noted_while_others_look_is_missed(consumer, gathering) -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            gathering.look()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for tag in range(1, 3001):
        consumer.take(tag)
        consumer.ack(tag)
    over.set()
    for thread in threads:
        thread.join()
    gathering.look()
    assert statuses_of(gathering) == {f"order-{tag}": "done" for tag in range(1, 3001)}
    assert gathering._taken == {} and consumer.notes.fresh == {}
