"""A center as it was before messages had an identity: the scripts that workers of the first version
run beside newer ones while they are replaced one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kombu_toc import Delivery, TimeoutCenter


class OlderCenter:
    """Pops, acknowledges and releases as that version did, on one server."""

    def __init__(self, center: TimeoutCenter) -> None:
        self.center = center

    def _run(self, script: str, keys: list[str], *args: Any) -> Any:
        text = Path(__file__).with_name(f"{script}.lua").read_text()
        return self.center.client.eval(text, len(keys), *keys, *args)

    def _keys(self, topic: str) -> list[str]:
        keys: list[str] = []
        for slot in self.center.topic(topic).all_slots():
            keys += (
                slot.announced_times,
                slot.prepare,
                slot.body,
                slot.dead,
                slot.reasons,
                *slot.stores,
            )
        return keys

    def pop(self, topic: str, limit: int = 100, visibility: float = 60.0) -> list[Delivery]:
        declared = self.center.topic(topic)
        slots, steps = declared.slot_span, len(declared.steps)
        limits = (16, 100, 0, 0, 10**9, 1000, 1)
        args = (slots, steps, limit, 0, 0, 0, int(visibility * 1000), *limits, *range(slots))
        reply = self._run("pop", [*self._keys(topic), self.center.keys.wake(topic)], *args)
        flat = reply[2]
        return [
            Delivery(topic, *flat[i : i + 2], flat[i + 2].decode(), *flat[i + 3 : i + 5], 16)
            for i in range(0, len(flat), 5)
        ]

    def ack(self, deliveries: list[Delivery]) -> int:
        topic = deliveries[0].topic
        declared = self.center.topic(topic)
        args: list[Any] = [declared.slot_span, len(declared.steps), 0, *range(declared.slot_span)]
        for delivery in deliveries:
            args += (delivery.slot, delivery.id, 0)
        keys = [*self._keys(topic), self.center.keys.wake(topic)]
        return self._run("ack", keys, *args)[0]

    def release(self, delivery: Delivery) -> int:
        declared = self.center.topic(delivery.topic)
        slot = declared.slot(delivery.slot)
        keys = [
            slot.announced_times,
            slot.prepare,
            *slot.stores,
            self.center.keys.wake(delivery.topic),
        ]
        message = (delivery.id, delivery.score, delivery.step, delivery.mark)
        return self._run("release", keys, len(declared.steps), slot.number, *message)[0]
