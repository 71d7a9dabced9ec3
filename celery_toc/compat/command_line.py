"""Celery's command line knows the commands of remote control that are added here.

Touches: ``celery.bin.control.inspect`` and ``control``, of whose click parameters the choices are
made anew, and ``Panel.meta``, where Celery keeps what commands there are.

Why: Celery before 5.4 makes the list of choices when the module is imported, before a command of
somebody's own can be registered.

Read in Celery 5.3.6 and 5.7.0.

Without: ``celery inspect toc``, ``celery control toc_pause`` and ``toc_resume`` are refused by
Celery's command line before 5.4. ``app.control`` sends them all the same.
"""

from __future__ import annotations

from kombu_toc import CompatPart

PART = CompatPart(
    "command-line",
    touches="the click parameters of celery.bin.control, and Panel.meta",
    lost="Celery's command line may not know `inspect toc`",
    check=lambda control, panel: [
        *CompatPart.missing(control, "inspect", "control"),
        *CompatPart.missing(panel, "meta"),
        *(CompatPart.missing(control.inspect, "params") if hasattr(control, "inspect") else ()),
    ],
)


def add_commands() -> None:
    """Make the commands known to Celery's command line, which is loaded."""
    import click
    from celery.bin import control
    from celery.worker.control import Panel

    if not PART.usable(control, Panel):
        return
    for command, kind in ((control.inspect, "inspect"), (control.control, "control")):
        names = [name for name, info in Panel.meta.items() if info.type == kind and info.visible]
        for parameter in command.params:
            if isinstance(parameter.type, click.Choice):
                parameter.type = click.Choice(names)
