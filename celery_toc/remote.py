"""Remote control: ``celery inspect toc``, ``celery control toc_pause`` and ``toc_resume``.

To import this module makes the commands known, in a worker and to Celery's command line.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import control_command, inspect_command, nok, ok


def _step(state: Any) -> Any:
    """The worker's step, or None if its broker is no timeout center."""
    return getattr(state.consumer, "timeout_center_step", None)


_NONE = "the broker of this worker is not a timeout center"


@inspect_command()
def toc(state: Any, **kwargs: Any) -> Any:
    """What the worker holds: leases, messages fetched ahead, times it serves; its lateness."""
    step = _step(state)
    return nok(_NONE) if step is None else step.report()


@control_command()
def toc_pause(state: Any, **kwargs: Any) -> Any:
    """Take no more tasks from any queue; those that are here go on."""
    step = _step(state)
    if step is None:
        return nok(_NONE)
    return ok("paused" if step.pause() else "was paused already")


@control_command()
def toc_resume(state: Any, **kwargs: Any) -> Any:
    """Take tasks again."""
    step = _step(state)
    if step is None:
        return nok(_NONE)
    return ok("takes tasks again" if step.resume() else "was not paused")
