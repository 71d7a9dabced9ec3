"""What limits the starts and the puts of a topic, as text for scripts: its *gates*.

A comma is behind each. Of starts:

==============  =================================================================================
``r<us>:<n>,``  the whole queue: microseconds between starts, and how many may come at once
``c<n>,``       the whole queue: how many run at once
``R<us>:<n>,``  each key: microseconds between starts, and how many may come at once
``C<n>,``       each key: how many run at once
``S,``          each key: one at a time, strictly in order
``L,``          with ``S``: a message that waits for its retry lets the others pass
``F,``          keys take turns
``w<k>=<x>,``   with ``F``: the weight of a key, encoded
==============  =================================================================================

Of puts: ``p<us>:<n>,`` for the whole queue, ``P<us>:<n>,`` for each key.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError
from .message_key import encode_key
from .terms import count_of, interval_us

#: How much longer than a rate says two starts are apart. A task starts some milliseconds after it
#: may, now more and now less; so that no stretch of time has more starts than the rate says, there
#: are half a percent fewer.
SLOWER = 1.005

#: Limits that say nothing without another, and which.
NEEDS = {
    "rate_burst": "rate",
    "key_burst": "key_rate",
    "key_retry": "key_order",
    "key_weights": "key_fair",
}

#: Limits that count the whole queue: on a Cluster such a queue has one slot.
WHOLE_QUEUE = ("rate", "concurrency", "put_rate")


def spacing_us(rate: str) -> float:
    """Microseconds between two starts of a queue or key with this rate."""
    return interval_us(rate) * SLOWER


def gates_of(said: Any) -> str:
    """What limits the starts of a topic; empty if nothing does.

    said: its :class:`.topic.Declaration`, here and below
    """
    made = []
    if said.rate:
        made.append(f"r{spacing_us(said.rate):.3f}:{said.rate_burst or 1}")
    if said.concurrency:
        made.append(f"c{said.concurrency}")
    if said.key_rate:
        made.append(f"R{spacing_us(said.key_rate):.3f}:{said.key_burst or 1}")
    if said.key_concurrency:
        made.append(f"C{said.key_concurrency}")
    if said.key_order == "serial":
        made.append("S")
        if said.key_retry == "later":
            made.append("L")
    if said.key_fair:
        made.append("F")
        made += [f"w{encode_key(key)}={weight:.15g}" for key, weight in said.key_weights or ()]
    return "".join(f"{one}," for one in made)


def put_gates_of(said: Any) -> str:
    """What limits the puts of a topic; empty if nothing does. So many as the rate says may come at
    once: 100 of ``100/s``."""
    rates = (("p", said.put_rate), ("P", said.key_put_rate))
    return "".join(
        f"{name}{interval_us(rate):.3f}:{count_of(rate)}," for name, rate in rates if rate
    )


def check_gates(topic: str, said: Any, *, clustered: bool) -> None:
    """Raise ConfigurationError, naming the topic, if limits do not go together."""
    for name, needed in NEEDS.items():
        if getattr(said, name) and not getattr(said, needed):
            raise ConfigurationError(
                f"queue {topic!r}: {name} says nothing without {needed}; set {needed}, or leave "
                f"{name} out"
            )
    if clustered:
        check_one_slot(topic, said, said.slots)


def check_one_slot(topic: str, said: Any, slots: int) -> None:
    """Raise ConfigurationError for a queue on a Cluster that something counts as a whole, if it is
    to have other slots than one."""
    limit = next((name for name in WHOLE_QUEUE if getattr(said, name)), None)
    if limit and (slots != 1 or said.draining_counts):
        former = " and former ones" if slots == 1 else ""
        raise ConfigurationError(
            f"queue {topic!r}: {limit} counts the whole queue, and on a Cluster the slots of a "
            f"queue are on several nodes: it needs one slot, not {slots}{former}; "
            f"'celery toc reshard {topic} --slots 1' changes that, or limit each key instead: "
            f"key_{limit}"
        )
