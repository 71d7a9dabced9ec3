"""The protocol of docs/protocol.md, by a client in another language: examples/node works beside the
center in Python, on the same topics, both ways.

If one of these fails because a script is called otherwise by now, clients of other makers fail as
well: raise the number of the protocol (docs/protocol.md, "Versions").
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Producer

from kombu_toc import TimeoutCenter
from kombu_toc.model.topic import slot_of
from kombu_toc.scripts import __main__ as writer
from kombu_toc.scripts.__main__ import names
from kombu_toc.scripts.call import load

from ..support import nursery
from ..support.cases import night
from ..support.cluster import Cluster
from ..support.inspection import announced, now_us, put_some, slot_keys
from ..support.servers import Server

ROOT = Path(__file__).parents[2]
NODE = ROOT / "examples" / "node"

#: Ids and bodies that are more than ASCII, or look like something else.
IDS = [
    "plain",
    "täsk-\N{SNOWMAN}-\N{PILE OF POO}",
    "a{b}c%",
    "with space\nand line",
    "0",
    "x" * 300,
]


class Node:
    """A client in Node.js: its calls, as methods."""

    def __init__(self, protocol: Path, address: str, *, cluster: bool) -> None:
        driver = Path(__file__).with_name("protocol_driver.js")
        words = ["node", str(driver), str(NODE), str(protocol), address]
        self._process = subprocess.Popen(
            [*words, "cluster" if cluster else "server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, name: str, *args: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([name, *args]) + "\n")
        process.stdin.flush()
        reply = json.loads(process.stdout.readline())
        assert "error" not in reply, reply
        return reply.get("ok")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.call(name, *args)

    def end(self) -> None:
        self._process.communicate(timeout=10)


def body_of(message: dict[str, Any]) -> str:
    """The body of a message that Node.js has popped."""
    return bytes(message["body"]["data"]).decode()


@pytest.fixture(scope="session")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``python -m kombu_toc.scripts`` writes."""
    words = [sys.executable, "-m", "kombu_toc.scripts"]
    made = nursery.run(words, cwd=ROOT, check=True, capture_output=True).stdout
    file = tmp_path_factory.mktemp("protocol") / "protocol.json"
    file.write_bytes(made)
    return file


@pytest.fixture
def address(server: Server | Cluster, client: redis.Redis) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def node(protocol: Path, server: Server | Cluster, address: str) -> Iterator[Node]:
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js")
    made = Node(protocol, address, cluster=isinstance(server, Cluster))
    yield made
    made.end()


class Topic:
    """The calls of a client in Node.js about one topic, as methods."""

    def __init__(self, node: Node, name: str, options: dict[str, Any] | None = None) -> None:
        self.node, self.topic = node, node.topic(name, *([options] if options else []))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.node.call(name, self.topic, *args)


@pytest.fixture
def mail(node: Node) -> Topic:
    return Topic(node, "mail")


@pytest.mark.cluster
def test_what_node_puts_python_pops_and_acknowledges(mail: Topic, center: TimeoutCenter) -> None:
    """X15"""

    for id in IDS:
        assert mail.put(id, f"to {id}") == {"id": id, "outcome": "added"}
    assert {slot for slot, _ in announced(center, "mail")} == {slot_of(id, 8) for id in IDS}
    got = {one.id: one for one in center.pop("mail", 100).messages}
    assert {id: one.body.decode() for id, one in got.items()} == {id: f"to {id}" for id in IDS}
    assert all(one.slot == slot_of(id, 8) for id, one in got.items())
    assert center.ack(got.values()) == len(IDS)
    assert slot_keys(center.client) == []


@pytest.mark.cluster
def test_what_python_puts_node_pops_renews_and_acknowledges(
    mail: Topic, center: TimeoutCenter, client: redis.Redis
) -> None:
    for id in IDS:
        center.put("mail", id, f"to {id}".encode())

    got = []
    while len(got) < len(IDS):
        some = mail.pop(4, {"visibility": 10})
        assert some
        got += some
    assert {one["id"]: body_of(one) for one in got} == {id: f"to {id}" for id in IDS}
    assert mail.pop(10) == []
    first = {one.id: one.time_us for one in center.get(IDS, topic="mail")}
    assert mail.extend(got, 300) == []
    for one in center.get(IDS, topic="mail"):
        assert one.time_us > first[one.id] + 200_000_000
    assert mail.ack(got) == len(IDS)
    assert mail.ack(got) == 0
    assert [one["id"] for one in mail.extend(got, 300)] == [one["id"] for one in got]
    assert slot_keys(client) == []


@pytest.mark.parametrize("sender", ["node", "python"])
def test_either_cancels_what_the_other_has_put(
    mail: Topic, center: TimeoutCenter, client: redis.Redis, sender: str
) -> None:

    for id in IDS:
        if sender == "node":
            assert mail.put(id, "later", {"delay": 60})["id"] == id
            assert [one.id for one in center.cancel(id, topic="mail")] == [id]
            assert mail.cancel(id) == []
        else:
            center.put("mail", id, b"later", delay=60)
            assert mail.cancel(id) == [id]
            assert not center.cancel(id, topic="mail")
    assert slot_keys(client) == []


def test_a_message_waits_until_its_time_whoever_puts_it(mail: Topic, center: TimeoutCenter) -> None:

    at = now_us(center.client) / 1e6 + 2
    mail.put("by-node", "1", {"at": at})
    center.put("mail", "by-python", b"2", at=at + 0.1)
    assert mail.pop(10) == []
    assert not center.pop("mail", 10).messages
    found = {one.id: one.time_us for one in center.get(["by-node", "by-python"])}
    assert abs(found["by-node"] - at * 1e6) < 10
    got = []
    while len(got) < 2:
        got += mail.wait(5, 10)
        assert now_us(center.client) >= (at + 0.1 * (len(got) - 1)) * 1e6
    assert [one["id"] for one in got] == ["by-node", "by-python"]
    assert now_us(center.client) < (at + 0.1 + 3) * 1e6  # woken: it would have waited for 5 s
    assert mail.ack(got) == 2
    assert slot_keys(center.client) == []


def test_who_waits_in_node_hands_back_what_it_has_claimed(
    mail: Topic, center: TimeoutCenter, client: redis.Redis
) -> None:

    center.put("mail", "later", b"", delay=60)
    [announced] = client.zrange(center.keys.wake("mail"), 0, -1)
    assert mail.wait(0.2) == []
    assert client.zrange(center.keys.wake("mail"), 0, -1) == [announced]


def test_what_goes_first_goes_first_for_both(node: Node, center: TimeoutCenter) -> None:
    mail = Topic(node, "mail", {"slots": 1, "steps": [0, 5]})
    mail.put("low", "", {"priority": 9})
    center.put("mail", "low-too", b"", priority=5)
    mail.put("high", "", {"priority": 4})
    center.put("mail", "high-too", b"")
    assert [one["id"] for one in mail.pop(2)] == ["high", "high-too"]
    assert [one.id for one in center.pop("mail", 9).messages] == ["low", "low-too"]


def test_two_live_messages_may_share_an_id_and_each_is_acknowledged_alone(
    mail: Topic, center: TimeoutCenter, client: redis.Redis
) -> None:

    center.put("mail", "same", b"1")
    copy = mail.put("same", "2")["id"]
    assert re.fullmatch("same#[0-9a-f]{16}", copy)
    assert mail.put("same", "3", {"ifExists": "keep"}) == {"id": "same", "outcome": "kept"}
    got = {one["id"]: one for one in mail.pop(9)}
    assert {id: body_of(one) for id, one in got.items()} == {"same": "1", copy: "2"}
    assert mail.ack([got[copy]]) == 1
    assert [one.id for one in center.get("same")] == ["same"]
    assert mail.ack([got["same"]]) == 1
    center.put("mail", "again", b"1", delay=60)
    center.put("mail", "again", b"2", delay=60)
    assert len(mail.cancel("again")) == 2
    assert slot_keys(client) == []


def test_a_basis_selects_the_slot_for_both(mail: Topic, center: TimeoutCenter) -> None:

    bases = ["customer-42", "kundé", "7"]
    for number, basis in enumerate(bases):
        mail.put(f"n{number}", "", {"basis": basis})
        center.put("mail", f"p{number}", b"", basis=basis)
    slots = {one["id"]: one["slot"] for one in mail.pop(9)}
    for number, basis in enumerate(bases):
        assert slots[f"n{number}"] == slots[f"p{number}"] == slot_of(basis, 8)
    mail.put("found", "", {"delay": 60, "basis": "customer-42"})
    center.registry.forget("mail")
    assert [one.id for one in center.cancel("found")] == ["found"]


def test_a_repeated_publish_of_node_adds_nothing(mail: Topic, center: TimeoutCenter) -> None:

    for _ in range(2):
        assert mail.put("once", "x", {"publish": "me.1"})["id"] == "once"
        for one in center.pop("mail", 5).messages:
            center.ack([one])
    assert center.counts("mail") == (0, 0, 0, 0)
    assert not center.pop("mail", 5).messages


def test_each_put_of_node_is_a_message_and_a_token_names_one_for_both(
    mail: Topic, center: TimeoutCenter
) -> None:

    for _ in range(3):
        assert mail.put("m", "same")["outcome"] == "added"
    assert mail.put("m", "same", {"token": "order 7"})["outcome"] == "added"
    assert mail.put("m", "same", {"token": "order 7"})["outcome"] == "repeated"
    assert center.put("mail", "m", b"same", token="order 7").outcome == "repeated"
    center.put("mail", "n", b"", token="t")
    assert mail.put("n", "", {"token": "t"}) == {"id": "n", "outcome": "repeated"}
    assert center.counts("mail").ready == 5


def test_node_replaces_what_waits(mail: Topic, center: TimeoutCenter) -> None:

    center.put("mail", "m", b"old", delay=3600)
    done = mail.put("m", "new", {"ifExists": "replace", "delay": 60})
    assert done == {"id": "m", "outcome": "replaced"}
    [found] = center.get("m")
    assert found.body == b"new"
    assert center.queues.coming("mail", [120]) == [1]
    assert mail.put("other", "x", {"ifExists": "replace"})["outcome"] == "added"


def test_a_late_acknowledgement_of_node_leaves_another_message_alone(
    mail: Topic, center: TimeoutCenter
) -> None:

    mail.put("m", "1")
    late = mail.pop()
    assert len(center.cancel("m", in_flight=True)) == 1
    center.put("mail", "m", b"2")
    [now] = center.pop("mail").messages
    assert mail.extend(late, 60) == late
    assert mail.ack(late) == 0
    assert center.ack([now]) == 1


def test_a_message_of_node_may_have_a_visibility_of_its_own(
    mail: Topic, center: TimeoutCenter, client: redis.Redis
) -> None:

    mail.put("short", "", {"visibility": 5, "maxLease": 900})
    [one] = center.pop("mail").messages
    [found] = center.get("short")
    assert 0 < found.time_us - now_us(client) <= 5_000_000
    assert center.ack([one]) == 1


def test_node_declares_a_topic_and_keeps_to_what_was_declared_first(
    node: Node, center: TimeoutCenter
) -> None:
    assert node.topic("mail", {"slots": 4, "retries": 2, "visibility": 7})["slots"] == 4
    declared = center.registry.topic("mail").declaration
    assert (declared.slots, declared.retries, declared.visibility) == (4, 2, 7)
    assert declared.bases is False
    center.queues.declare("sms", slots=2)
    assert node.topic("sms", {"slots": 16})["slots"] == 2


def test_python_takes_a_receipt_that_node_has_written(node: Node, center: TimeoutCenter) -> None:
    center.put("täglich", "m-\N{SNOWMAN}", b"", priority=5)
    mail = Topic(node, "täglich")
    [one] = mail.pop()
    receipt = mail.receipt(one)
    [found] = center.get(one["id"])
    assert not center.extend([receipt], 600)
    assert center.get(one["id"])[0].time_us > found.time_us + 500_000_000
    assert center.ack([receipt]) == 1
    assert center.ack([receipt]) == 0
    assert slot_keys(center.client) == []


def test_node_rolls_back_leases_if_it_is_told_to(mail: Topic, center: TimeoutCenter) -> None:

    mail.put("m", "1")
    [first] = mail.pop()
    assert mail.extend([first], 0.001) == []
    assert mail.pop() == []
    time.sleep(0.01)  # until the lease has ended
    [again] = mail.pop(1, {"recover": 100, "until": now_us(center.client) / 1e6})
    assert (again["id"], first["left"], again["left"]) == ("m", 16, 15)
    assert mail.extend([first], 60) == [first]
    assert mail.ack([first]) == 1  # the same message, however late
    assert slot_keys(center.client) == []


def test_node_finds_what_lies_in_slots_of_before(node: Node, center: TimeoutCenter) -> None:
    center.queues.declare("mail", slots=16)
    ids = [f"m{number}" for number in range(60)]
    put_some(center, "mail", ids)
    declared = center.registry.topic("mail")
    changed = replace(declared.declaration, slots=2, draining_counts=(16,))
    assert center.registry.redeclare(declared, changed)
    mail = Topic(node, "mail")

    assert mail.cancel("m7") == ["m7"]
    mail.put("new", "")
    got = mail.pop(100)
    assert {one["id"] for one in got} == {*ids, "new"} - {"m7"}
    assert mail.ack(got) == 60


@pytest.mark.parametrize("countdown", [False, True])
def test_node_reads_what_celery_sends_and_celery_what_node_sends(
    node: Node, center: TimeoutCenter, connection: Connection, countdown: bool
) -> None:
    headers = {"id": "id-of-the-task", "task": "shop.mail", "lang": "py"}
    headers["root_id"] = headers["id"]
    if countdown:  # what waits is compressed
        headers["x-delay"] = "60000"
    producer = Producer(connection.default_channel)
    producer.publish([[1, "é"], {}, {}], routing_key="mail", headers=headers, serializer="json")
    [found] = center.get("id-of-the-task")
    data = {"type": "Buffer", "data": list(found.body)}
    assert (found.body[:1] == b"{") is not countdown
    read = node.read({"id": found.id, "body": data})
    assert read["headers"]["task"] == "shop.mail"
    assert read["properties"]["delivery_info"]["routing_key"] == "mail"
    assert (read["contentType"], read["contentEncoding"]) == ("application/json", "utf-8")
    assert read["body"] == [[1, "é"], {}, {}]
    Topic(node, "sms").send("täsk", "shop.\N{SNOWMAN}", [7, "é"])
    queue = connection.SimpleQueue("sms")
    message = queue.get(timeout=5)
    assert message.payload[:2] == [[7, "é"], {}]
    assert (message.headers["id"], message.headers["task"]) == ("täsk", "shop.\N{SNOWMAN}")
    message.ack()
    queue.close()


@pytest.mark.one_server("the example names one server")
def test_the_example_runs(protocol: Path, address: str, client: redis.Redis) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no Node.js")
    words = ["node", "remind.js", str(protocol), address]
    began = time.monotonic()
    said = subprocess.run(words, cwd=NODE, check=True, capture_output=True, text=True, timeout=30)
    assert time.monotonic() - began < 10
    assert said.stdout.splitlines()[-1] == "reminded: order 42"
    assert slot_keys(client) == []


def test_the_command_writes_the_scripts_into_a_folder(
    tmp_path: Path, client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    assert writer.main([str(tmp_path / "made")]) == 0
    data = json.loads((tmp_path / "made" / "protocol.json").read_text())
    for name, script in data["scripts"].items():
        text = (tmp_path / "made" / f"{name}.lua").read_text()
        assert client.script_load(text) == script["sha1"]
    (tmp_path / "file").write_text("")
    assert writer.main([str(tmp_path / "file")]) == 1
    assert "cannot write into" in capsys.readouterr().err


GIVEN = ("", "0", "1", "2", "-1", "16", "0.5", "1e18", "1e308", "9007199254740993", "nan", "inf")
GIVEN += ("-inf", "x", "%", "{", "[]", "{}", '{"slots":1}', ";k1", "c1,r2,", "1:2", "mail")
GIVEN += ("y" * 300,)


@pytest.mark.one_server("one key at a time would tell as little of a Cluster")
@pytest.mark.parametrize("calls", [8, night(500)])
def test_whatever_a_script_is_called_with_it_ends_and_other_keys_are_as_they_were(
    center: TimeoutCenter, client: redis.Redis, calls: int
) -> None:
    center.put("mail", "kept", b"x", delay=3600)
    chosen = random.Random(calls)
    before = client.info("memory")["used_memory"]
    keys = [f"toc:{{odd:0}}:{n}" for n in range(8)]
    odd = ["1e308", "9007199254740993", "0", ";k1", "2", "x", "x", "1", "1", "x", "-1"]
    ended = [client.register_script(load("ack").text)(keys, odd)]  # more slots than it has keys
    ended.append(client.register_script(load("put_many").text)(keys, ["0", "0", "0", "", "1,"]))
    for name in names():
        script = client.register_script(load(name).text)
        for _ in range(calls):
            keys = [f"toc:{{odd:0}}:{n % 12}" for n in range(chosen.choice((1, 2, 7, 8, 14, 20)))]
            with suppress(redis.ResponseError):
                ended.append(script(keys, chosen.choices(GIVEN, k=chosen.randrange(20))))
    assert len(ended) > 1
    for key in client.scan_iter("toc:{odd:0}:*"):
        client.unlink(key)
    assert center.queues.names() == ["mail"]
    assert [one.body for one in center.get("kept")] == [b"x"]
    assert client.info("memory")["used_memory"] - before < 4 << 20
