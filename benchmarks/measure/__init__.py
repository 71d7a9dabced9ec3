"""What is measured, a module each.

A module has ``METRICS`` (name -> Metric), ``CASES`` (name -> (arguments, arguments of the short
form)), ``measure(peer, **arguments)``, which returns a number or None for each metric, and, where
not every peer running Celery takes part, ``takes_part(peer, case)``. ``ROUNDS``: how often, in
the long and in the short form, if not as the rest. ``LONG``: cases that the short form leaves out
unless they are asked for. ``notes()``: what to say of what it leaves out on this machine.
"""

from __future__ import annotations

from types import ModuleType

from . import (
    behind,
    by_id,
    drain,
    event_loop,
    fair,
    fleet,
    floor,
    gossip,
    http,
    idle,
    lateness,
    library,
    limits,
    memory,
    notify,
    now,
    otel,
    page,
    publish,
    put_many,
    recurring,
    scale,
    serial,
    server,
    spread,
    storm,
    unique,
)

MODULES = (
    *(lateness, now, drain, storm, spread, behind),
    *(publish, put_many, event_loop, memory, scale, fleet, by_id, gossip, idle, floor, server),
    *(limits, fair, serial, unique, recurring),
    *(library, http, notify, page, otel),
)

#: case -> its module
CASES: dict[str, ModuleType] = {case: module for module in MODULES for case in module.CASES}


def takes_part(peer: object, case: str) -> bool:
    """Whether a case is measured with that peer."""
    rule = getattr(CASES[case], "takes_part", None)
    return rule(peer, case) if rule else peer.is_celery
