"""A worker's consumer gets one more bootstep.

Touches: `Consumer.Blueprint.default_steps`, to which the step is added.

Why: ``app.steps["consumer"]`` is the public way, for who has the app. The transport is asked for by
a worker of any app, with gevent and eventlet after Celery has told of it (``worker_init``).

Read in Celery 5.3.6 and 5.7.0.

Without: a worker would know nothing of leases, and give back what its processes execute when its
connection breaks. Nothing starts.
"""

from __future__ import annotations

from typing import Any

from kombu_toc import CompatPart

PART = CompatPart(
    "bootstep",
    touches="Celery's Consumer.Blueprint.default_steps",
    lost="a worker would give back tasks that it executes",
    check=lambda blueprint: [
        *CompatPart.missing(blueprint, "default_steps"),
        *CompatPart.missing(getattr(blueprint, "default_steps", []), "append", "__contains__"),
    ],
    way_out="Install Celery 5.3.6 to 5.7",
)


def add(step: type) -> None:
    """Give it to every worker's consumer that is made from now on. Raises CompatError."""
    from celery.worker.consumer import Consumer

    blueprint: Any = Consumer.Blueprint
    PART.usable(blueprint)
    if step not in blueprint.default_steps:
        blueprint.default_steps.append(step)
