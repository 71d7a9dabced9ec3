"""Puts messages of 200 bytes into a timeout center; prints how many a second as JSON.

Arguments: the broker's URL, and how many messages.
"""

from __future__ import annotations

import json
import sys
import time

import kombu_toc

#: In one list.
TOGETHER = 10_000


def main(url: str, number: int) -> None:
    center = kombu_toc.center_for(url)
    begin = time.time() + 86_400
    # Over an hour in no order, as messages of many senders are.
    messages = [
        {"id": f"m-{n:08d}", "body": b"%0200d" % n, "at": begin + n * 7919 % 3600 + n * 1e-4}
        for n in range(number)
    ]
    one_by_one = messages[: number // 20]
    center.put_many("warm-up", messages[:1000])
    found = {}
    began = time.perf_counter()
    for message in one_by_one:
        center.put("one", **message)
    found["one_by_one"] = len(one_by_one) / (time.perf_counter() - began)
    began = time.perf_counter()
    for start in range(0, number, TOGETHER):
        center.put_many("many", messages[start : start + TOGETHER])
    found["scheduled"] = number / (time.perf_counter() - began)
    began = time.perf_counter()
    for start in range(0, number, TOGETHER):
        some = messages[start : start + TOGETHER]
        center.put_many("now", [{"id": one["id"], "body": one["body"]} for one in some])
    found["immediate"] = number / (time.perf_counter() - began)
    taken = []
    while messages := center.pop("now", 2000).messages:
        taken += messages
    began = time.perf_counter()
    assert center.ack(taken) == number
    found["acked"] = number / (time.perf_counter() - began)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
