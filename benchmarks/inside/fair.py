"""How many messages of a tenant with a backlog go before one of another; prints it as JSON.

Arguments: the broker's URL, and how many messages wait.
"""

from __future__ import annotations

import json
import sys

import kombu_toc

#: In one list, and how often a small tenant's message is looked for.
TOGETHER, TURNS = 10_000, 100


def main(url: str, backlog: int) -> None:
    center = kombu_toc.center_for(url)
    center.queues.declare("mail", slots=1, key_fair=True)
    for start in range(0, backlog, TOGETHER):
        some = range(start, min(start + TOGETHER, backlog))
        center.put_many(
            "mail", [{"id": f"m{n}", "body": b"%0200d" % n, "key": "large"} for n in some]
        )
    center.ack(center.pop("mail", 20).messages)
    passed = []
    for turn in range(TURNS):
        center.put("mail", f"small-{turn}", b"", key="small")
        count = 0
        while True:
            [message] = center.pop("mail", 1).messages
            center.ack(message)
            if message.id.startswith("small"):
                break
            count += 1
        passed.append(count)
    print(json.dumps({"before": max(passed)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
