"""Topics that go away when nobody uses them.

There are two kinds. A topic for replies or events is kept by whoever has declared it, and its keys
live as long as its declaration says without being refreshed. A topic with ``kept``, which is a
queue's ``x-expires``, goes to the second: that long after its last consumer has left, and after the
last declaration or put. Its keys outlive that, lest a server that stands still for a moment takes
messages from consumers that live: somebody sweeps the topic when its time has come.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from secrets import token_urlsafe

from ..model.keys import Keys
from ..model.topic import Topic
from ..scripts.call import ScriptCall, load, texts
from .registry import Registry
from .runner import Runner


class _User:
    """The name of this process among those that use a topic."""

    def __init__(self) -> None:
        self._pid = 0
        self._name = ""

    def __str__(self) -> str:
        if self._pid != os.getpid():  # a forked child is another process
            self._pid = os.getpid()
            self._name = f"{socket.gethostname()}:{self._pid}:{token_urlsafe(6)}"
        return self._name


_user = _User()


class Expiring:
    """Keeps topics that expire, and finds those that have expired."""

    def __init__(self, runner: Runner, registry: Registry, keys: Keys) -> None:
        self._runner = runner
        self._client = runner.client
        self._registry = registry
        self._keys = keys

    def refresh(self, name: str, expires_ms: int) -> None:
        """Keep a topic that expires, with its messages; declare it again if it has expired.

        One that this center has never seen, and that nobody has declared, was deleted just now:
        nothing is done.
        """
        registry = self._registry
        found = registry.recent(name) or registry.known(name)
        if found is None:
            return
        if found.declaration.kept:
            self.hold(found)
            return
        wanted = replace(found.declaration, expires=expires_ms)
        topic: Topic = self._runner.run(registry.declare_call(name, wanted))
        if topic.declaration.expires:  # else it is another's by now, and stays
            self._keep_keys(topic, expires_ms)

    def hold(self, topic: Topic) -> None:
        """Keep a topic with ``kept`` for that long, because it is consumed here."""
        self._keep_keys(topic, topic.declaration.kept or 0)
        self._runner.run(self._using(topic, topic.declaration.kept or 0))

    def leave(self, topic: Topic) -> None:
        """It is consumed here no more: it expires, unless others use it."""
        self._runner.run(self._using(topic, 0))

    def touch(self, topic: Topic, margin_ms: int = 0) -> None:
        """A topic with ``kept`` was declared, or something is put: it begins to expire anew.

        margin_ms: milliseconds that it lasts longer
        """
        declaration = topic.declaration
        call = self._registry.declare_call(topic.name, declaration)
        name, wanted, expires = call.args
        self._keep_keys(topic, declaration.kept or 0)
        self._runner.run(call._replace(args=(name, wanted, expires + margin_ms)))

    def _using(self, topic: Topic, hold_ms: int) -> ScriptCall:
        name, declaration = topic.name, topic.declaration
        return ScriptCall(
            load("use"),
            (self._keys.topics, self._keys.expiring, self._keys.users(name), self._keys.names),
            (name, declaration.to_json(), declaration.expires or 0, str(_user), hold_ms),
            lambda raw: self._registry.learn(name, raw),
        )

    def _keep_keys(self, topic: Topic, lifetime_ms: int) -> None:
        with self._client.pipeline(transaction=False) as pipe:
            for slot in topic.all_slots():
                for key in slot.all():
                    pipe.pexpire(key, lifetime_ms)
            pipe.pexpire(self._keys.wake(topic.name), lifetime_ms)
            pipe.execute()

    def stale(self, most: int = 100) -> list[str]:
        """Take the names of what has expired: ``topic:NAME`` and ``exchange:NAME``."""
        names: list[str] = self._runner.run(
            ScriptCall(
                load("sweep"),
                (self._keys.expiring, self._keys.topics, self._keys.names),
                (most,),
                texts,
            )
        )
        return names
