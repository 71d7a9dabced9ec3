"""What a pop costs the server with many keys, beside one without; prints it as JSON.

Arguments: the broker's URL, how many messages, how many keys.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kombu_toc

#: In one list.
TOGETHER = 10_000

#: Messages of a pop, and how many pops are measured, of each queue in turn.
LIMIT, POPS = 20, 300


def fill(center: Any, topic: str, number: int, keys: int = 0) -> None:
    """Put messages that are due at once."""
    for start in range(0, number, TOGETHER):
        center.put_many(
            topic,
            [
                {
                    "id": f"m{n}",
                    "body": b"%0200d" % n,
                    **({"key": f"tenant-{n % keys}"} if keys else {}),
                }
                for n in range(start, min(start + TOGETHER, number))
            ],
        )


def settle(center: Any, topic: str) -> None:
    """Let the server finish enlarging its hashes. It moves a few entries with each look-up, which
    costs much more than the look-up itself: whether that goes on here depends on how many messages
    there are by chance, as from 115,000 to 131,000 in a slot with Valkey 9.1."""
    declared = center.registry.topic(topic)
    for number in range(declared.slots):
        slot = declared.slot(number)
        for key in (slot.body, slot.tokens):
            for _ in range(50):
                center.client.hmget(key, ["nothing"] * 1000)


def pop(center: Any, topic: str) -> float:
    """Microseconds that the server needed to deliver some messages; they are acknowledged."""
    center.client.config_resetstat()
    taken = center.pop(topic, LIMIT).messages
    stats = center.client.info("commandstats")
    scripts = [stats[name]["usec"] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats]
    if len(taken) != LIMIT:
        raise RuntimeError(f"{topic}: {len(taken)} of {LIMIT} messages came")
    center.ack(taken)
    return float(sum(scripts))


def main(url: str, number: int, keys: int) -> None:
    center = kombu_toc.center_for(url)
    center.queues.declare("plain")
    center.queues.declare("keyed", key_concurrency=LIMIT, key_rate="100/s", key_burst=100)
    fill(center, "plain", number)
    fill(center, "keyed", number, keys)
    for topic in ("plain", "keyed"):
        settle(center, topic)
        for _ in range(20):
            pop(center, topic)
    times: dict[str, list[float]] = {"plain": [], "keyed": []}
    for _ in range(POPS):
        for topic, found in times.items():
            found.append(pop(center, topic))
    plain, keyed = (sorted(times[topic])[POPS // 2] for topic in ("plain", "keyed"))
    print(json.dumps({"plain": plain, "keyed": keyed, "ratio": keyed / plain}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
