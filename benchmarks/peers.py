"""The product and its peers: how each is started and what it is run with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .servers import RabbitNode, RedisServer

ROOT = Path(__file__).parents[1]
INSIDE = Path(__file__).parent / "inside"


@dataclass
class Broker:
    """A broker that runs.

    server: None if it is not a Redis
    """

    url: str
    server: RedisServer | None = None


@dataclass(frozen=True)
class Peer:
    """One that is measured.

    python: of the environment that has it
    broker: starts a fresh broker for one measurement
    settings: of the Celery app
    jobs: the module in `inside` that stands for worker and producer, if it is not Celery
    worker: its arguments then, after the Python
    checkout: of the product, if that is what it is
    """

    name: str
    title: str
    python: Path
    broker: Callable[[], Any]
    settings: dict[str, Any] = field(default_factory=dict)
    jobs: str | None = None
    worker: tuple[str, ...] = ()
    checkout: Path | None = None

    @property
    def is_product(self) -> bool:
        return self.checkout is not None

    @property
    def is_celery(self) -> bool:
        return self.jobs is None

    @property
    def is_redis(self) -> bool:
        return self.name != "rabbitmq"

    @property
    def path(self) -> str:
        """What is added to Python's path."""
        return f"{INSIDE}:{self.checkout}" if self.is_product else str(INSIDE)


def on_redis(scheme: str) -> Callable[[], Any]:
    """Starts a Redis server; its broker URL has that scheme."""

    @contextmanager
    def broker() -> Iterator[Broker]:
        with (
            tempfile.TemporaryDirectory(prefix="toc-bench-") as directory,
            RedisServer(Path(directory)) as server,
        ):
            yield Broker(f"{scheme}://{server.address}/0", server)

    return broker


def on_rabbit(node: RabbitNode) -> Callable[[], Any]:
    """Makes a virtual host on the node."""

    @contextmanager
    def broker() -> Iterator[Broker]:
        host = node.new_host()
        try:
            yield Broker(f"amqp://guest:guest@127.0.0.1:{node.port}/{host}")
        finally:
            node.drop_host(host)

    return broker


#: RabbitMQ as Celery's documentation has it for scheduled tasks: quorum queues, a topic exchange
#: (its delayed delivery needs one), and publishes that are confirmed, as Redis's replies are.
RABBIT_SETTINGS = {
    "task_default_queue_type": "quorum",
    "task_default_exchange_type": "topic",
    "broker_transport_options": {"confirm_publish": True},
}

#: name -> (title, what its worker is started with)
OTHERS = {
    "rq": ("RQ", ("-m", "rq.cli", "worker", "--with-scheduler", "--quiet", "--url", "{url}")),
    "dramatiq": ("Dramatiq", ("-m", "dramatiq", "jobs_dramatiq", "-p", "1", "-t", "2")),
    "arq": ("arq", ("-m", "arq", "jobs_arq.WorkerSettings")),
    "saq": ("SAQ", ("-m", "saq", "jobs_saq.settings", "--quiet")),
    "huey": ("Huey", ("-m", "huey.bin.huey_consumer", "jobs_huey.huey", "-w", "2", "-q")),
}

#: In the order of the table's columns.
TITLES = {
    "toc": "celery-toc",
    "before": "celery-toc before",
    "redis": "Kombu redis://",
    "valkey": "celery-redis-plus",
    "rabbitmq": "RabbitMQ quorum",
    **{name: title for name, (title, _) in OTHERS.items()},
}

#: name -> the environment that has it
ENVIRONMENT = {
    "toc": "toc",
    "before": "toc",
    "redis": "toc",
    "valkey": "plus",
    "rabbitmq": "toc",
    **dict.fromkeys(OTHERS, "others"),
}


def make(name: str, python: Path, node: RabbitNode, before: Path | None = None) -> Peer:
    """The peer of that name. before: another checkout of the product, for "before"."""
    title = TITLES[name]
    if name in ("toc", "before"):
        checkout = before if name == "before" else ROOT
        return Peer(name, title, python, on_redis("toc+redis"), checkout=checkout)
    if name == "rabbitmq":
        return Peer(name, title, python, on_rabbit(node), RABBIT_SETTINGS)
    if name in OTHERS:
        worker = OTHERS[name][1]
        return Peer(name, title, python, on_redis("redis"), jobs=f"jobs_{name}", worker=worker)
    return Peer(name, title, python, on_redis(name))
