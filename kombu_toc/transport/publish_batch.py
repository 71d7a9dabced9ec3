"""Publishes that leave together, for ``Producer.batch()`` of Kombu 5.7."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kombu.exceptions import KombuError
from redis.exceptions import ResponseError

from ..consumer.connections import BROKEN
from ..scripts.call import ScriptCall

try:
    from kombu.exceptions import BatchPublishError
except ImportError:  # Kombu before 5.7 publishes no batches

    class BatchPublishError(KombuError):  # type: ignore[no-redef]
        """A batch failed; what of it was delivered is uncertain."""


#: Messages of a batch for which it is forgotten, when it is complete, that they were put; of more,
#: this goes by itself.
MAX_NOTED = 50_000

#: Keys that one command deletes.
PAGE = 100


class PublishBatch:
    """Publishes that leave together, for ``Producer.batch()`` of Kombu 5.7.

    A message that is sent twice because a reply was lost stays one message, so the messages of a
    batch that has failed may be published again in another one, whatever has become of them.
    """

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self.max_size = max_size
        self._calls: list[ScriptCall] = []
        self._over = ""
        #: where it is remembered that a message of the batch was put, and of those that were
        self._notes: list[str] = []
        #: of those that are recorded, who does that, and the record of each
        self._write: Callable[[list[Any]], None] | None = None
        self._records: list[Any] = []
        #: what takes back those that are in the task library only, and have not left yet
        self._withdraws: list[Callable[[], None]] = []
        self._noted: deque[str] = deque(maxlen=MAX_NOTED)

    def publish(self, message: dict[str, Any], **kwargs: Any) -> Any:
        """Route a prepared message and keep it until the batch is full or flushed."""
        self._check()
        result = self.channel.basic_publish(message, _publish_batch=self, **kwargs)
        if len(self._calls) >= self.max_size:
            self.flush()
        return result

    def add(self, call: ScriptCall, note: str) -> None:
        """Take what the channel has made of a message.

        note: the key in which it is remembered that it was put
        """
        self._calls.append(call)
        self._notes.append(note)

    def record(self, write: Callable[[list[Any]], None], record: Any) -> None:
        """Keep the record of a message until the messages leave; write: writes them, before"""
        self._write = write
        self._records.append(record)

    def add_far(self, withdraw: Callable[[], None]) -> None:
        """A message of the batch is in the task library only.

        withdraw: takes it back if the batch is aborted before it leaves
        """
        self._withdraws.append(withdraw)

    def flush(self) -> None:
        """Send what has gathered. Raises Kombu's BatchPublishError if any of it fails."""
        self._check()
        calls, self._calls = self._calls, []
        notes, self._notes = self._notes, []
        records, self._records = self._records, []
        self._withdraws = []
        try:
            if self._write is not None and records:
                self._write(records)
            self.channel.center.run_puts(calls)
        except Exception as exc:
            self._over = "has failed before"
            raise BatchPublishError("publish batch failed; delivery is uncertain") from exc
        self._noted.extend(notes)

    def discard(self) -> None:
        """Forget what was not sent yet."""
        self._calls, self._notes = [], []
        self._records = []
        withdraws, self._withdraws = self._withdraws, []
        for withdraw in withdraws:
            withdraw()
        self._over = "is aborted"

    def close(self) -> None:
        """It is complete, unless it has failed: nobody will repeat it."""
        if self._over:
            return
        self._over = "is closed"
        by_slot: dict[str, list[str]] = defaultdict(list)
        for key in self._noted:
            by_slot[key.rpartition(":sent:")[0]].append(key)
        with (
            suppress(*BROKEN, ResponseError),  # they go by themselves within a minute
            self.channel.center.client.pipeline(transaction=False) as pipe,
        ):
            for keys in by_slot.values():
                for start in range(0, len(keys), PAGE):
                    pipe.unlink(*keys[start : start + PAGE])
            pipe.execute()

    def _check(self) -> None:
        if self._over:
            raise RuntimeError(f"the publish batch {self._over}")
