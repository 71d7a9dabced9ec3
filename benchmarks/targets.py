"""What is to be reached. Each is judged within one run, on one machine."""

from __future__ import annotations

from typing import NamedTuple

BEST = "best"
ITSELF = "itself"


class Target(NamedTuple):
    """A bound on one of the product's metrics.

    against: a peer's name, BEST for the best of the peers, ITSELF for the number as it is, or
        "case:NAME" for the product's same metric in another case
    """

    case: str
    metric: str
    sign: str  #: ">=" or "<="
    bound: float
    against: str

    def met_by(self, value: float) -> bool:
        return value >= self.bound if self.sign == ">=" else value <= self.bound


TARGETS = (
    Target("lateness", "p50", "<=", 1.0, "redis"),
    Target("lateness", "p99", "<=", 1.0, "redis"),
    Target("lateness-loaded", "p50", "<=", 1.1, "case:lateness"),
    Target("lateness-loaded", "p99", "<=", 1.1, "case:lateness"),
    Target("now", "p50", "<=", 0.8, "redis"),
    Target("now", "p50", "<=", 1.0, "valkey"),
    Target("now", "p50", "<=", 1.0, "rabbitmq"),
    Target("drain", "rate", ">=", 3.0, "redis"),
    Target("drain", "rate", ">=", 1.75, "valkey"),
    Target("drain", "rate", ">=", 1.1, "rabbitmq"),
    Target("storm", "rate", ">=", 1.3, BEST),
    Target("spread", "p99", "<=", 0.8, BEST),
    Target("behind", "waited", "<=", 0, ITSELF),
    Target("publish", "later", ">=", 1.25, "redis"),
    Target("publish", "later_batch", ">=", 1.25, "redis"),
    Target("put_many", "scheduled", ">=", 20_000.0, ITSELF),
    Target("asyncio", "now_times", ">=", 3.0, ITSELF),
    Target("asyncio", "later_times", ">=", 3.0, ITSELF),
    Target("asyncio", "p99", "<=", 5.0, ITSELF),
    Target("http", "puts", ">=", 3_000.0, ITSELF),
    Target("http", "pulls", ">=", 20_000.0, ITSELF),
    Target("http", "late", "<=", 5.0, ITSELF),
    Target("http", "waiting", "<=", 5.0, ITSELF),
    Target("notify", "rate", ">=", 2_000.0, ITSELF),
    Target("notify", "beside_p99", "<=", 20.0, ITSELF),
    *(Target("page", view, "<=", 300.0, ITSELF) for view in ("overview", "queue", "message")),
    Target("limits-rate", "least", ">=", 950, ITSELF),
    Target("limits-rate", "most", "<=", 1001, ITSELF),
    Target("limits-opening", "opened", "<=", 5.0, ITSELF),
    Target("limits-opening", "together", "<=", 1, ITSELF),
    Target("limits-keys", "ratio", "<=", 1.5, ITSELF),
    Target("fair-million", "before", "<=", 1, ITSELF),
    Target("serial", "disordered", "<=", 0, ITSELF),
    Target("memory", "bytes", "<=", 0.35, "redis"),
    Target("memory", "held", "<=", 0.35, "redis"),
    Target("memory-million", "growth", "<=", 2.0, ITSELF),
    *(
        Target("scale", f"{name}_{where}_ratio", "<=", 1.3, ITSELF)
        for name in ("put", "pop")
        for where in ("client", "server")
    ),
    *(
        Target(f"fleet-{number}", metric, "<=", 3.0, ITSELF)
        for number in (1, 10, 50)
        for metric in ("commands", "bare")
    ),
    Target("fleet-revoke-20", "scripts", "<=", 30.0, ITSELF),
    Target("fleet-revoke-1000", "scripts", "<=", 1100.0, ITSELF),
    Target("fleet-gossip-500", "lag_max", "<=", 2.0, ITSELF),
    Target("fleet-gossip-500", "cpu", "<=", 1.0, ITSELF),
    *(
        Target("library-drain", f"drain_ratio_{engine}", ">=", 0.85, ITSELF)
        for engine in ("sqlite", "postgresql", "mariadb")
    ),
    Target("library-put_many", "put_many_postgresql", ">=", 5000.0, ITSELF),
    Target("library-rebuild", "rebuild_postgresql", ">=", 20_000.0, ITSELF),
    Target("library-behind", "behind_publish_ratio", ">=", 0.95, ITSELF),
    Target("library-behind", "behind_drain_ratio", ">=", 0.95, ITSELF),
    Target("library-far", "memory_near", "<=", 50.0, ITSELF),
    Target("library-far", "load", ">=", 10_000.0, ITSELF),
    Target("library-far", "find_max", "<=", 5.0, ITSELF),
    Target("library-growth", "find_biz@10M", "<=", 5.0, ITSELF),
    Target("idle-500", "cpu", "<=", 10.0, ITSELF),
    Target("idle-500", "lost_max", "<=", 1000.0, ITSELF),
)
