"""What a run's broker is, and the faults that are its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from redis.crc import key_slot

from ..support.cluster import NODE_TIMEOUT, Cluster, Node
from ..support.proxy import Proxy
from ..support.sentinels import NAME, Deployment
from ..support.servers import Server, SteppedServer
from ..support.waiting import wait_until
from .app_queues import LIMITED, QUEUES
from .verdict import SLOTS, Event

if TYPE_CHECKING:
    from .run import Fault

#: Each write is on the disk before it is answered.
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")

#: Seconds by which the server's clock is stepped: more than a lease.
CLOCK_STEP = 7.0

#: What a server is told for a fault.
COMMANDS = {"cut": "CLIENT KILL TYPE normal SKIPME yes", "flush": "SCRIPT FLUSH"}

#: What is to be done after so many seconds.
Later = Callable[[float, Callable[[], None]], None]

#: Hash slots by queue and the number of its slot.
HASH_SLOTS = {
    (queue, number): key_slot(f"{queue}:{number}".encode())
    for queue in (*QUEUES, *LIMITED)
    for number in range(SLOTS)
}

#: The hash slot of what belongs to no single slot.
HOME = key_slot(b"toc")


class Single:
    """One server behind a proxy.

    scheme: of the URL
    sends: what only one kind of command has: "publish", "ack", "pop"
    """

    def __init__(self, directory: Path, scheme: str, sends: dict[str, bytes]) -> None:
        directory.mkdir()
        self._server = SteppedServer(directory, *DURABLE)
        self._scheme, self._sends = scheme, sends
        self._proxy: Proxy | None = None
        self._frozen = False

    def start(self) -> None:
        self._server.start()
        self._proxy = Proxy(self._server.port).start()

    def stop(self) -> None:
        if self._proxy is not None:
            self._proxy.stop()
        if self._frozen:
            self._thaw()
        self._server.stop()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._proxy.port}/0"

    #: whether it can be hit again, and what went wrong in itself
    ready = True
    broken: tuple[str, ...] = ()

    def hit(self, fault: Fault, event: Event, later: Later) -> None:
        if fault.what == "cut":
            self._proxy.cut()
        elif fault.what == "cut halfway":
            self._proxy.cut_replies_after(fault.dice % 40)
        elif fault.what.startswith("lose "):  # "lose a pop's reply"
            self._proxy.drop_replies(self._sends[fault.what.split()[-2].removesuffix("'s")])
        elif fault.what == "freeze":
            self._proxy.freeze()
            later(fault.seconds, self._proxy.thaw)
        elif fault.what == "freeze halfway":
            self._proxy.freeze_replies_after(fault.dice % 40)
            later(fault.seconds, self._proxy.cut)
        elif fault.family == "restart":
            (self._server.kill if fault.what == "crash" else self._server.stop)()
            later(fault.seconds, lambda: self._start_again(event))
        elif fault.what == "server frozen":
            os.kill(self._server.pid, signal.SIGSTOP)
            self._frozen = True
            later(fault.seconds, self._thaw)
        elif fault.family == "clock":
            event.step = CLOCK_STEP if fault.what == "clock forward" else -CLOCK_STEP
            self._server.step(event.step)
        elif fault.what == "full":
            with self._server.client() as client:
                client.config_set("maxmemory", "1mb")  # less than it has
            later(fault.seconds, self._make_room)
        elif fault.what == "flush":
            with self._server.client() as client:
                client.script_flush()

    def _start_again(self, event: Event) -> None:
        self._server.start()
        event.until = time.time()  # it has read its file

    def _thaw(self) -> None:
        self._frozen = False
        os.kill(self._server.pid, signal.SIGCONT)

    def _make_room(self) -> None:
        with self._server.client() as client:
            client.config_set("maxmemory", "0")

    def clients(self) -> Iterator[redis.Redis]:
        """A client of each server that holds messages."""
        with self._server.client() as client:
            yield client


class Several:
    """Servers of which one takes another's place; whoever operates them is a thread of its own."""

    def __init__(self) -> None:
        self._operator = ThreadPoolExecutor(1, thread_name_prefix="operator")
        self._doing: Future[None] | None = None
        self._last = ""
        self.broken: list[str] = []

    @property
    def ready(self) -> bool:
        """Whether it is whole, as far as that depends on faults of its own."""
        if self._doing is None or not self._doing.done():
            return self._doing is None
        error = self._doing.exception()
        if error is not None:
            self.broken.append(f"{self._last}: {type(error).__name__}: {error}")
        self._doing = None
        return True

    def hit(self, fault: Fault, event: Event, later: Later) -> None:
        self._last = fault.what
        self._doing = self._operator.submit(self._hit, fault, event, random.Random(fault.dice))

    def _hit(self, fault: Fault, event: Event, dice: random.Random) -> None:
        raise NotImplementedError

    @staticmethod
    def _tell(servers: Iterable[Server], what: str) -> None:
        """Cut the connections of clients, or flush scripts."""
        for server in servers:
            with server.client() as client:
                client.execute_command(*COMMANDS[what].split())

    @staticmethod
    @contextlib.contextmanager
    def _stopped(server: Server) -> Iterator[None]:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(server.pid, signal.SIGCONT)


class OfCluster(Several):
    """A Cluster of three primaries with a replica each; now and then there is a fourth."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._cluster = Cluster(directory, *DURABLE, replicas=1)
        self._added: list[Node] = []

    def start(self) -> None:
        self._cluster.start()
        # A publish whose reply came is on two servers: no fault takes both.
        self.url = f"{self._cluster.toc_url}?toc_wait_replicas=1"

    def stop(self) -> None:
        self._operator.shutdown()
        self._cluster.stop()

    def clients(self) -> Iterator[redis.Redis]:
        for node in self._cluster.primaries():
            with node.client() as client:
                yield client

    def _hit(self, fault: Fault, event: Event, dice: random.Random) -> None:
        cluster, what = self._cluster, fault.what
        if what in COMMANDS:
            self._tell(cluster.primaries(), what)
        elif what == "kill a primary":
            self._kill(self._victim(dice), fault, event)
        elif what == "kill the primary of {toc}":
            self._kill(cluster.owner(HOME), fault, event)
        elif what == "crash of a node":
            victim = self._victim(dice)
            cluster.kill(victim)
            time.sleep(fault.seconds)  # nobody takes its place so soon
            cluster.restart(victim)
        elif what == "failover":
            cluster.failover(self._victim(dice))
        elif what == "node paused":
            with self._stopped(self._victim(dice)):
                time.sleep(fault.seconds)  # that is the fault
        elif what == "node paused for long":
            victim = self._victim(dice)
            self._forgets(victim, event)
            with self._stopped(victim):
                time.sleep(fault.seconds)  # that is the fault
            # It still believes that it is a primary, and serves what has piled up.
        elif what == "migrate slots":
            slots = dice.sample(sorted({*HASH_SLOTS.values()}), len(HASH_SLOTS) // 2)
            self._migrate(slots, dice.choice(self._guarded()))
        elif what == "migrate {toc}":
            home = cluster.owner(HOME)
            to = dice.choice([node for node in self._guarded() if node is not home])
            self._migrate([HOME], to)
        elif what == "nodes come and go":
            self._change(dice)
        cluster.wait_ok(60)
        event.until = time.time()

    def _guarded(self) -> list[Node]:
        """Primaries that have slots and a replica."""
        cluster = self._cluster
        return [n for n in cluster.primaries() if cluster.slots_of(n) and cluster.replicas_of(n)]

    def _victim(self, dice: random.Random) -> Node:
        """One that has messages."""
        owners = {self._cluster.owner(slot) for slot in HASH_SLOTS.values()}
        return dice.choice([node for node in self._guarded() if node in owners])

    def _kill(self, victim: Node, fault: Fault, event: Event) -> None:
        self._forgets(victim, event)
        self._cluster.kill(victim)
        self._cluster.wait_ok(60)
        time.sleep(fault.seconds)  # it comes back when the others have forgotten it
        self._cluster.restart(victim)

    def _forgets(self, node: Node, event: Event) -> None:
        """The replica that takes its place may not have heard the last of it."""
        has = set(self._cluster.slots_of(node))
        event.forgets = frozenset(name for name, slot in HASH_SLOTS.items() if slot in has)

    def _migrate(self, slots: list[int], to: Node) -> None:
        """As an operator does it: again, if a node says that a replica of its is not there yet."""
        for attempt in range(3):
            try:
                self._cluster.migrate_slots(slots, to, step=1)
            except redis.exceptions.ResponseError as exc:
                if "NOREPLICAS" not in str(exc) or attempt == 2:
                    raise
                self._cluster.wait_ok(60)
            else:
                return

    def _change(self, dice: random.Random) -> None:
        """A primary and its replica join, and get their share; or those that did so leave."""
        cluster = self._cluster
        if not self._added:
            primary = cluster.add_node()
            self._added = [primary, cluster.add_node(replica_of=primary)]
            slots = dice.sample(sorted({*HASH_SLOTS.values()}), len(HASH_SLOTS) // 4)
            self._migrate(slots, primary)
            return
        pair, self._added = self._added, []
        pair.sort(key=lambda node: node in cluster.primaries())
        slots, others = cluster.slots_of(pair[1]), [n for n in self._guarded() if n not in pair]
        for number, other in enumerate(others):
            self._migrate(slots[number :: len(others)], other)
        for node in pair:  # the replica first: nobody forgets whom it follows
            cluster.forget(node)
            node.kill()


class OfSentinel(Several):
    """A master, its replica and three sentinels."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        directory.mkdir()
        # With the latter, one that is no master any more soon takes nothing. One replica: of two,
        # sentinels may promote the one that has not what the other has confirmed.
        options = (*DURABLE, "--min-replicas-to-write", "1")
        self._deployment = Deployment(directory, *options)
        self._servers = [self._deployment.primary, *self._deployment.replicas]

    def start(self) -> None:
        self._deployment.start()
        self.url = f"{self._deployment.toc_url}&toc_wait_replicas=1"

    def stop(self) -> None:
        self._operator.shutdown()
        self._deployment.stop()

    def clients(self) -> Iterator[redis.Redis]:
        with self._deployment.acting().client() as client:
            yield client

    def _hit(self, fault: Fault, event: Event, dice: random.Random) -> None:
        master, what = self._deployment.acting(), fault.what
        if what in COMMANDS:
            self._tell([master], what)
        elif what == "kill a sentinel":
            victim = dice.choice(self._deployment.sentinels)
            victim.kill()
            time.sleep(fault.seconds)  # the others have to do without
            victim.start()
        else:
            event.forgets = frozenset(HASH_SLOTS)
            if what == "kill the master":
                master.kill()
                self._until(lambda: self._deployment.acting() is not master)
                time.sleep(fault.seconds)  # nobody waits for it
                self._follow(master)
            elif what == "failover by sentinels":
                with dice.choice(self._deployment.sentinels).client() as sentinel:
                    sentinel.execute_command("SENTINEL", "FAILOVER", NAME)
                self._until(lambda: self._deployment.acting() is not master)
            else:
                with self._stopped(master):
                    time.sleep(fault.seconds)  # that is the fault
                self._until(lambda: self._deployment.acting() is not master)
        self._until(self._whole)
        event.until = time.time()

    def _follow(self, server: Server) -> None:
        """Start it as a replica of the master, as its own configuration would say."""
        options = list(server.options)
        if "--replicaof" in options:
            at = options.index("--replicaof")
            del options[at : at + 3]
        port = str(self._deployment.acting().port)
        server.options = ("--replicaof", "127.0.0.1", port, *options)
        server.start()

    def _whole(self) -> bool:
        master = self._deployment.acting()
        for server in self._servers:
            with server.client() as client:
                info = client.info("replication")
            if server is master:
                states = [value["state"] for key, value in info.items() if key[:5] == "slave"]
                if info["role"] != "master" or states != ["online"]:
                    return False
            elif info.get("master_port") != master.port or info["master_link_status"] != "up":
                return False
        return True

    @staticmethod
    def _until(holds: Callable[[], bool]) -> None:
        wait_until(holds, 60, "the sentinels do not settle it")


#: Faults with sentinels beside those of workers.
SENTINEL_FAMILIES: dict[str, tuple[str, ...]] = {
    "master": ("kill the master", "failover by sentinels", "master paused for long"),
    "sentinel": ("kill a sentinel",),
    "cut": ("cut",),
    "flush": ("flush",),
}

#: Faults of a Cluster beside those of workers.
CLUSTER_FAMILIES: dict[str, tuple[str, ...]] = {
    "node": ("kill a primary", "kill the primary of {toc}", "crash of a node"),
    "failover": ("failover",),
    "pause": ("node paused", "node paused for long"),
    "migrate": ("migrate slots", "migrate {toc}"),
    "grow": ("nodes come and go",),
    "cut": ("cut",),
    "flush": ("flush",),
}

#: How long they take, in seconds; what is not here takes as long as it takes.
LENGTHS = {
    "kill the master": (0.2, 1.5),
    "kill a sentinel": (1, 3),
    "master paused for long": (2, 4),
    "kill a primary": (0.2, 1.5),
    "kill the primary of {toc}": (0.2, 1.5),
    "crash of a node": (0.1, 0.5),
    "node paused": (0.3, 0.5 * NODE_TIMEOUT / 1000),
    "node paused for long": (NODE_TIMEOUT / 1000 + 1.5, NODE_TIMEOUT / 1000 + 4),
}
