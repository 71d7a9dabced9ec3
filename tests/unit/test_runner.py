"""The runner and its executors, with clients that reply what a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import redis
from redis.exceptions import NoScriptError

from kombu_toc.center.calls import add_counters
from kombu_toc.center.runner import Runner, executor_for
from kombu_toc.metrics import Metrics
from kombu_toc.model.topic import Keys
from kombu_toc.scripts.call import ScriptCall, load

#: What a client replies to a command: a function of what was sent.
Replies = Callable[[Any], Any]

PUT, POP = load("put"), load("pop")


class Encoder:
    decode_responses = False


class Client:
    """A client of one server that packs for itself."""

    def __init__(self, reply: Replies) -> None:
        self.reply = reply
        self.sent: list[list[bytes]] = []

    def get_encoder(self) -> Encoder:
        return Encoder()

    def run_packed(self, commands: list[bytes]) -> list[Any]:
        self.sent.append(commands)
        return [self.reply(command) for command in commands]

    def pipeline(self, transaction: bool) -> Pipeline:
        assert not transaction
        return Pipeline(self)


class Pipeline:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.commands: list[tuple[Any, ...]] = []

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def execute_command(self, *command: Any) -> None:
        self.commands.append(command)

    def execute(self, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error
        self.client.sent.append([command[0].encode() for command in self.commands])
        return [self.client.reply(command) for command in self.commands]


class Nodes(Client):
    """A client of a Cluster."""

    claimed: ClassVar[dict[tuple[str, str], bool]] = {}

    def place_of(self, key: str) -> tuple[str, int]:
        return ("node", len(key))

    def run_keyed(
        self, commands: Sequence[tuple[str, bytes]], wait: tuple[Any, ...] = ()
    ) -> tuple[list[Any], list[Any]]:
        self.sent.append([packed for _, packed in commands])
        replies = [self.reply(packed) for _, packed in commands]
        return replies, [2 if wait else None for _ in commands]


def runner(client: Any, **options: Any) -> Runner:
    def counting(topic: str | None, added: dict[str, int]) -> ScriptCall:
        return add_counters(Keys("toc:"), topic, added)

    return Runner(client, Metrics(active=False), counting, **options)


def call(script: Any = PUT, **more: Any) -> ScriptCall:
    return ScriptCall(script, ("key",), (1,), lambda raw: ("parsed", raw), **more)


def once_unknown(then: Any) -> Replies:
    """A server that knows no script before its text was sent."""
    known: set[str] = set()

    def reply(command: Any) -> Any:
        text = command if isinstance(command, bytes) else repr(command).encode()
        for script in (PUT, POP):
            if script.sha.encode() in text:
                return then if script.sha in known else NoScriptError("NOSCRIPT")
        for script in (PUT, POP):
            if script.text.splitlines()[-1].encode() in text:
                known.add(script.sha)
        return then

    return reply


@pytest.mark.versions
def test_an_executor_is_chosen_by_the_client() -> None:
    one, several = executor_for(Client(len)), executor_for(Nodes(len))
    assert (one.clustered, one.place_of("key")) == (False, None)
    assert (several.clustered, several.place_of("key")) == (True, ("node", 3))


def test_a_broken_connection_is_an_error_of_all_calls_but_on_a_cluster_of_its_node() -> None:
    def broken(command: Any) -> Any:
        raise redis.ConnectionError("gone")

    with pytest.raises(redis.ConnectionError):
        runner(Client(broken)).run_each([call()])
    error = redis.ConnectionError("gone")
    assert runner(Nodes(lambda command: error)).run_each([call()]) == [error]


def test_on_a_cluster_what_a_script_could_not_announce_is_announced() -> None:
    """One call a wake index, however many slots have something to announce."""

    def reply(command: Any) -> Any:
        return [[3, 10**15], []] if PUT.sha.encode() in command else 1

    client = Nodes(reply)
    calls = [call(wake=("wake", 0)), call(wake=("wake", 0)), call(POP)]
    runner(client).run_all(calls)
    assert [len(commands) for commands in client.sent] == [3, 1]
    [announced] = client.sent[1]
    assert announced.count(b"3:1000000000000000") == 1


def test_replicas_are_asked_again_after_a_script_was_sent_with_its_text() -> None:
    known = once_unknown(7)
    client = Client(lambda command: 2 if command[0] == "WAIT" else known(command))
    assert runner(client, wait_replicas=2).run_puts([call()]) == [("parsed", 7)]
    assert client.sent == [[b"EVALSHA", b"WAIT"], [b"EVAL", b"WAIT"]]
