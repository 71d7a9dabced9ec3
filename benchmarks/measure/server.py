"""server: processor time that the server spends on a plain message, beside a script that does no
more than it must: TIME, HSETNX and ZADD to put it; ZRANGE, HMGET, ZREM and HDEL to take four.
"""

from __future__ import annotations

from ..metrics import Metric
from ..peers import Peer
from ..trial import Trial

METRICS = {
    "put": Metric("server, a publish", "us"),
    "put_over": Metric("the same, of what TIME, HSETNX and ZADD take", "times"),
    "put_commands": Metric("commands that the script of a publish runs", "commands"),
    "drain": Metric("server, a message taken and acknowledged, in fours", "us"),
    "drain_over": Metric("the same, of what ZRANGE, HMGET, ZREM and HDEL take", "times"),
    "drain_commands": Metric("commands that these scripts run a message", "commands"),
}
CASES = {"server": ({"messages": 4000}, {"messages": 2000})}
ROUNDS = (3, 1)


def takes_part(peer: Peer, case: str) -> bool:
    return peer.is_product


def measure(peer: Peer, messages: int) -> dict[str, float]:
    """Microseconds, times and numbers of commands."""
    with Trial(peer) as trial:
        return trial.run_inside("server.py", trial.broker.url, messages)
