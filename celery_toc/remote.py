"""Remote control: ``celery inspect toc``, ``celery control toc_pause`` and ``toc_resume``.

To import this module makes the commands known in a worker.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import Panel, control_command, inspect_command, nok, ok


def tell_command_line() -> None:
    """Make the commands known to Celery's command line, which is loaded."""
    import click
    from celery.bin import control

    for command, kind in ((control.inspect, "inspect"), (control.control, "control")):
        names = [name for name, info in Panel.meta.items() if info.type == kind and info.visible]
        for parameter in command.params:
            if isinstance(parameter.type, click.Choice):  # older Celery has made the list by now
                parameter.type = click.Choice(names)


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
