"""What a log is told of a pop: what it did beside delivering."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .wording import task_names

if TYPE_CHECKING:
    from ..center.center import TimeoutCenter
    from ..model.results import Popped

logger = logging.getLogger(__name__)

#: Ids of dropped messages that one line names, at most.
MAX_DROPPED = 10


def log_pop(center: TimeoutCenter, tally: Counter[str], topic: str, result: Popped) -> None:
    """Log and count it.

    tally: is counted up: "bare" (ids without a body), "rolled back", "died", "dropped"
    """
    tally["bare"] += len(result.bare)
    tally["rolled back"] += len(result.rolled_back)
    tally["died"] += len(result.died)
    tally["dropped"] += len(result.dropped)
    for id in result.bare:
        logger.error("message %s of %s had no body: removed", id, topic)
    names = task_names(center, topic, result.rolled_back + result.died, result.messages)
    log_undelivered(logger.log, topic, names, result.rolled_back, result.died, result.dropped)
    if result.expired:
        tally["expired"] += len(result.expired)
        log_expired(logger.log, topic, result.expired)


def log_expired(log: Callable[..., None], topic: str, expired: Sequence[str]) -> None:
    """Log which messages were too old to be delivered. log: as :meth:`logging.Logger.log`"""
    if expired:
        more = ", ..." if len(expired) > MAX_DROPPED else ""
        log(
            logging.WARNING,
            "%s: %d messages have expired, they are not delivered: %s",
            *(topic, len(expired), ", ".join(expired[:MAX_DROPPED]) + more),
        )


def log_undelivered(
    log: Callable[..., None],
    topic: str,
    names: Mapping[str, str],
    rolled_back: Iterable[str],
    died: Iterable[str],
    dropped: Sequence[str],
) -> None:
    """Log what became of messages that were not delivered, by their ids.

    log: as :meth:`logging.Logger.log`; names: of their tasks, as :func:`.wording.task_names`
    """
    for id in rolled_back:
        log(
            logging.WARNING,
            "message %s of %s%s: its lease ended, it is delivered again",
            *(id, topic, names[id]),
        )
    for id in died:
        log(
            logging.ERROR,
            "message %s of %s%s: lost for good, it is in DeadQueue",
            *(id, topic, names[id]),
        )
    if dropped:
        more = ", ..." if len(dropped) > MAX_DROPPED else ""
        log(
            logging.WARNING,
            "DeadQueue of %s: %d messages dropped, for they are too old or too many: %s",
            *(topic, len(dropped), ", ".join(dropped[:MAX_DROPPED]) + more),
        )
