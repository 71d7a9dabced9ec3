"""A real Redis Cluster for tests: server processes on loopback ports, joined, broken, changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.retry import Retry

from kombu_toc.client.connection import Client as NodeClient
from kombu_toc.client.connection import ClusterClient

from .servers import Host, Server
from .waiting import wait_until

#: Slots that are in migration at the same time, at most.
AT_ONCE = 64

#: Milliseconds after which a node that is silent is taken for dead.
NODE_TIMEOUT = 2000

OPTIONS = (
    *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"),
    *("--cluster-node-timeout", str(NODE_TIMEOUT), "--cluster-announce-ip", "127.0.0.1"),
    # A replica is to be there at once, and to be promoted however long it was without primary.
    *("--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"),
    # Who is a replica of whom is for the test to say.
    *("--cluster-migration-barrier", "1000"),
)


class Client(ClusterClient):
    """The product's client, that answers as the client of one server does: for tests that are
    written for both."""

    #: What is to be done on every node.
    EVERYWHERE = frozenset(
        (
            *("ACL SETUSER", "ACL DELUSER", "CONFIG SET", "CONFIG RESETSTAT", "SCRIPT FLUSH"),
            *("CLIENT KILL", "CLIENT LIST", "CLIENT PAUSE", "FLUSHALL", "FLUSHDB"),
            *("DBSIZE", "INFO", "KEYS", "SCRIPT EXISTS"),
        )
    )

    def execute_command(self, *args: Any, **options: Any) -> Any:
        name = " ".join(args[:2]) if args[0] == "ACL" else args[0]
        if name == "EVAL" and not args[2]:  # without keys
            return self.client_for().execute_command(*args, **options)
        if name not in self.EVERYWHERE:
            return super().execute_command(*args, **options)
        return reduce(_added, (node.execute_command(*args, **options) for node in self.primaries()))

    def delete(self, *keys: Any) -> int:
        return sum(super(Client, self).delete(key) for key in keys)

    def mset(self, mapping: dict[str, Any]) -> None:
        for key, value in mapping.items():
            self.set(key, value)


def _added(one: Any, other: Any) -> Any:
    """What two nodes say: figures and lists together, and what either does."""
    if isinstance(one, dict):
        return {
            key: _added(one[key], other[key]) if key in one and key in other else value
            for key, value in {**one, **other}.items()
        }
    if one and isinstance(one, list) and isinstance(one[0], bool):
        return [mine or others for mine, others in zip(one, other, strict=True)]
    if isinstance(one, bool) or not isinstance(one, int | float | list):
        return one
    return one + other


class Node(Server):
    """A server of the cluster, whether it lives or not."""

    def __init__(self, directory: Path, password: str | None, *options: str) -> None:
        super().__init__(directory, *OPTIONS, *options)
        self.password = password
        self.id = ""

    def client(self, db: int = 0) -> redis.Redis:
        return redis.Redis(
            **self.host.reach(self.port),
            db=db,
            password=self.password,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=10,
        )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __call__(self, *command: Any) -> Any:
        """The reply to one command that this very node is to run."""
        with self.client() as client:
            return client.execute_command(*command)

    def __repr__(self) -> str:
        return f"<node {self.port}{'' if self.alive else ', dead'}>"


class _Seen:
    """One line of CLUSTER NODES: a node as another sees it."""

    def __init__(self, line: str) -> None:
        self.id, address, flags, primary, *_, self.link = (fields := line.split())[:8]
        self.port = int(address.split("@")[0].rpartition(":")[2])
        self.flags = set(flags.split(","))
        self.primary = None if primary == "-" else primary
        self.slots: set[int] = set()
        for part in fields[8:]:
            if not part.startswith("["):  # that one is in migration
                first, _, last = part.partition("-")
                self.slots.update(range(int(first), int(last or first) + 1))


class Cluster:
    """Primaries with replicas, each a process.

    directory: every node has a folder of its own in it
    primaries, replicas: how many of the first, and how many of the second each of those has
    options: of every server
    password: what every node asks for, if anything
    hosts: where the nodes run, one on each
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        primaries: int = 3,
        replicas: int = 0,
        password: str | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        self.directory, self._hosts = directory, hosts
        self.password = password
        self.options = options
        if password is not None:
            self.options += ("--requirepass", password, "--masterauth", password)
        self.nodes: list[Node] = []
        self._started = 0
        self._size = primaries
        self._replicas = replicas

    # -- starting and stopping

    def start(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        primaries = [self._launch() for _ in range(self._size)]
        for _ in range(self._replicas * self._size):
            self._launch()
        for number, node in enumerate(self.nodes):
            node.wait()
            node.id = node("CLUSTER", "MYID").decode()
            node("CLUSTER", "SET-CONFIG-EPOCH", number + 1)  # else they would have to settle it
        bounds = [REDIS_CLUSTER_HASH_SLOTS * n // self._size for n in range(self._size + 1)]
        for node, first, end in zip(primaries, bounds, bounds[1:], strict=False):
            node("CLUSTER", "ADDSLOTS", *range(first, end))
        for node in self.nodes[1:]:
            self.nodes[0]("CLUSTER", "MEET", node.host.address, node.port)
        self._until(self._all_met, "the nodes do not find each other")
        for number, node in enumerate(self.nodes[self._size :]):
            node("CLUSTER", "REPLICATE", primaries[number % self._size].id)
        self.wait_ok()

    def _launch(self) -> Node:
        self._started += 1
        directory = self.directory / f"node{self._started}"
        directory.mkdir(parents=True)
        node = Node(directory, self.password, *self.options)
        if self._hosts:
            node.host = self._hosts[self._started - 1]
            node.options += ("--cluster-announce-ip", node.host.address)
        node.launch()
        self.nodes.append(node)
        return node

    def stop(self) -> None:
        """End all of them; their data is not needed any more."""
        for node in self.nodes:
            node.kill()

    def kill(self, node: Node) -> None:
        """End it as a crash would; the others find out by themselves."""
        node.kill()

    def restart(self, node: Node) -> None:
        """Start a killed node on its ports, with what it had kept of its data."""
        node.start()

    # -- asking

    @property
    def toc_url(self) -> str:
        word = f":{self.password}@" if self.password else ""
        addresses = ",".join(f"{node.host.address}:{node.port}" for node in self.nodes)
        return f"toc+cluster://{word}{addresses}"

    @property
    def port(self) -> int:
        """One of its ports."""
        return self.living()[0].port

    def answers(self) -> bool:
        return all(node.answers() for node in self.living())

    def client(self) -> Client:
        """A client of the whole cluster."""

        def of_node(place: tuple[str, int]) -> NodeClient:
            host, port = place
            pool = redis.ConnectionPool(
                **{"host": host, "port": port, "password": self.password, "protocol": 2},
                **{"socket_timeout": 10, "retry": Retry(NoBackoff(), 0)},
            )
            return NodeClient(pool)

        return Client([("127.0.0.1", node.port) for node in self.living()], of_node)

    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def primaries(self) -> list[Node]:
        """Those that live and have slots, or may have them."""
        return [node for node in self.living() if node("INFO", "replication")["role"] == "master"]

    def replicas_of(self, node: Node) -> list[Node]:
        """Its replicas that live."""
        return [self._by_id(seen.id) for seen in self._seen(node) if seen.primary == node.id]

    def owner(self, slot: int) -> Node:
        """The primary that the first living node takes for the slot's owner."""
        for seen in self._seen(self.living()[0]):
            if slot in seen.slots:
                return self._by_id(seen.id)
        raise AssertionError(f"nobody has slot {slot}")

    def node_of(self, key: str | bytes) -> Node:
        return self.owner(self.slot_of(key))

    @staticmethod
    def slot_of(key: str | bytes) -> int:
        return key_slot(key if isinstance(key, bytes) else key.encode())

    def slots_of(self, node: Node) -> list[int]:
        """The hash slots that it says it has."""
        return sorted(next(s.slots for s in self._seen(node) if "myself" in s.flags))

    def keys(self, pattern: str = "*") -> list[bytes]:
        """The keys of all primaries."""
        found: set[bytes] = set()
        for node in self.primaries():
            with node.client() as client:
                found.update(client.scan_iter(match=pattern, count=1000))
        return sorted(found)

    def logs(self) -> str:
        return "\n".join(f"--- {node}\n{node.logs()[-3000:]}" for node in self.nodes)

    def _by_id(self, id_: str) -> Node:
        return next(node for node in self.nodes if node.id == id_)

    def _seen(self, node: Node) -> list[_Seen]:
        return [_Seen(line) for line in node("CLUSTER", "NODES").decode().splitlines()]

    # -- waiting

    def wait_ok(self, seconds: float = 30) -> None:
        """Return when all that live know all, agree on the owner of every slot, and serve."""
        self._until(self.is_whole, "the cluster does not become whole", seconds)

    def _until(self, holds: Callable[[], bool], what: str, seconds: float = 30) -> None:
        wait_until(holds, seconds, lambda: f"{what}\n{self.logs()}")

    def _all_met(self) -> bool:
        ports = {node.port for node in self.nodes}
        return all(
            {seen.port for seen in known} == ports
            and not any(seen.flags & {"handshake", "noaddr"} for seen in known)
            for known in map(self._seen, self.living())
        )

    def is_whole(self) -> bool:
        """Whether all that live know all, agree, and serve."""
        views = set()
        for node in self.living():
            try:
                info = node("CLUSTER", "INFO")
                replication = node("INFO", "replication")
                known = self._seen(node)
            except redis.exceptions.RedisError:  # it loads its data, or is just being promoted
                return False
            if b"cluster_state:ok" not in info or b"cluster_slots_ok:16384" not in info:
                return False
            if replication.get("master_link_status", "up") != "up":
                return False
            if {seen.port for seen in known} != {node.port for node in self.nodes}:
                return False
            alive = {node.id for node in self.living()}
            if any(("fail" in s.flags) == (s.id in alive) or "fail?" in s.flags for s in known):
                return False
            views.add(frozenset((s.id, s.primary, frozenset(s.slots)) for s in known))
        return len(views) == 1

    # -- changing

    def failover(self, node: Node) -> Node:
        """Promote one of its replicas while it lives; returns the new primary."""
        replica = self.replicas_of(node)[0]
        replica("CLUSTER", "FAILOVER")
        self._until(lambda: replica in self.primaries(), f"{replica} is not promoted")
        self.wait_ok()
        return replica

    def add_node(self, replica_of: Node | None = None) -> Node:
        """A node more: a primary without slots, or a replica."""
        node = self._launch()
        node.wait()
        node.id = node("CLUSTER", "MYID").decode()
        self.living()[0]("CLUSTER", "MEET", "127.0.0.1", node.port)
        self._until(self._all_met, f"{node} is not found")
        if replica_of is not None:
            node("CLUSTER", "REPLICATE", replica_of.id)
        self.wait_ok()
        return node

    def remove_node(self, node: Node) -> None:
        """Give its slots to the other primaries, and let all forget it, and end it."""
        others = [other for other in self.primaries() if other is not node]
        slots = self.slots_of(node)
        for number, other in enumerate(others):
            self.migrate_slots(slots[number :: len(others)], other)
        self.forget(node)
        node.kill()

    def forget(self, node: Node) -> None:
        """Let all others forget it, which has no slots or is dead."""
        self.nodes.remove(node)
        for other in self.living():
            other("CLUSTER", "FORGET", node.id)
        self.wait_ok()

    def migrate_slots(
        self,
        slots: Iterable[int],
        to: Node,
        *,
        step: int = 10,
        midway: Callable[[int], None] | None = None,
    ) -> None:
        """Move hash slots with their keys while they are used, as redis-cli reshards.

        step: how many keys go at once
        midway: called with the slot after each of these steps, while the slot is at both nodes
        """
        owners = {
            slot: self._by_id(seen.id)
            for seen in self._seen(self.living()[0])
            for slot in seen.slots
        }
        from_: dict[Node, list[int]] = {}
        for slot in slots:
            if owners[slot] is not to:
                from_.setdefault(owners[slot], []).append(slot)
        for source, moved in from_.items():
            for first in range(0, len(moved), AT_ONCE):
                self._migrate(moved[first : first + AT_ONCE], source, to, step, midway)
        self.wait_ok()

    def _migrate(
        self,
        slots: list[int],
        source: Node,
        to: Node,
        step: int,
        midway: Callable[[int], None] | None,
    ) -> None:
        self._set_slots(to, slots, "IMPORTING", source)
        self._set_slots(source, slots, "MIGRATING", to)
        auth = ("AUTH", self.password) if self.password else ()
        with source.client() as client:
            for slot in slots:
                while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, step):
                    address = ("127.0.0.1", to.port, "", 0, 5000)
                    client.execute_command("MIGRATE", *address, *auth, "KEYS", *keys)
                    if midway is not None:
                        midway(slot)
        # First who gets them: were the source first, nobody would have them for a moment.
        for node in (to, source, *(n for n in self.primaries() if n not in (to, source))):
            self._set_slots(node, slots, "NODE", to)

    @staticmethod
    def _set_slots(node: Node, slots: list[int], what: str, other: Node) -> None:
        with node.client() as client, client.pipeline(transaction=False) as pipeline:
            for slot in slots:
                pipeline.execute_command("CLUSTER", "SETSLOT", slot, what, other.id)
            for reply in pipeline.execute(raise_on_error=False):
                # Who has lost its last slot, and has heard so, is a replica by now.
                if isinstance(reply, Exception) and "only with master" not in str(reply):
                    raise reply
