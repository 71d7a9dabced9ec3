"""Flower's Broker page shows the queues of a timeout center.

Touches: ``flower.utils.broker.Broker.__new__``, which is replaced on the class.

Why: Flower decides by the broker URL's scheme whom it asks for the queues, out of a list which
nothing can be added to. Any other scheme gets an error page.

Read in Flower 2.0.1.

Without: Flower's Broker page shows an error. Its other pages are not concerned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu_toc import CompatPart

PART = CompatPart(
    "flower",
    touches="Flower's Broker.__new__",
    lost="Flower's Broker page shows an error",
    check=lambda broker: [] if "__new__" in vars(broker) else ["Broker.__new__"],
)


def install(ours: Callable[..., Any]) -> None:
    """Let Flower find what `ours` makes for a broker URL of ours; it gets Flower's arguments."""
    from flower.utils.broker import Broker

    if not PART.usable(Broker):
        return
    choose = Broker.__new__

    def choose_or_ours(cls: type, broker_url: str, *args: Any, **kwargs: Any) -> Any:
        if broker_url.partition("://")[0].partition("+")[0] == "toc":
            return ours(broker_url, **kwargs)
        return choose(cls, broker_url, *args, **kwargs)

    Broker.__new__ = staticmethod(choose_or_ours)
