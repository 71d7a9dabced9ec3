"""What programs may use: public names with their signatures, commands with their options, options.

    python -m tests.public_names        writes tests/public_names.json anew

tests/meta/test_public_names.py compares. A change of the file is a change for users: it has a line
in CHANGELOG.md. The HTTP API is compared with docs/openapi.json, the scripts with docs/protocol.md.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import redis

FILE = Path(__file__).with_suffix(".json")
MODULES = (
    "kombu_toc",
    "kombu_toc.exporter",
    "kombu_toc.http",
    "kombu_toc.notify",
    "celery_toc",
    "celery_toc.aio",
    "celery_toc.metrics",
    "celery_toc.web",
)


def signature(value: Any) -> str:
    """As it is written, without what a default's repr tells of this process."""
    if isinstance(value, type) or not callable(value):
        return ""
    signed = inspect.signature(value)
    bare = [one.replace(annotation=one.empty) for one in signed.parameters.values()]
    bare = [one if one.default is one.empty else one.replace(default=...) for one in bare]
    return str(signed.replace(parameters=bare, return_annotation=signed.empty))


def names_of(module: str) -> Iterator[tuple[str, str]]:
    """Each public name, and of a class each public method."""
    home = import_module(module)
    for name in sorted(home.__all__):
        value = getattr(home, name)
        yield f"{module}.{name}", signature(value)
        if isinstance(value, type):
            for member in sorted(vars(value)):
                if not member.startswith("_"):
                    yield f"{module}.{name}.{member}", signature(getattr(value, member))


def parts() -> Iterator[tuple[str, str]]:
    """Each method of the parts of a timeout center."""
    center = import_module("kombu_toc").TimeoutCenter(redis.Redis(port=1))
    for part in center.PARTS:
        for name, method in inspect.getmembers(getattr(center, part), callable):
            if not name.startswith("_"):
                yield f"kombu_toc.TimeoutCenter.{part}.{name}", signature(method)


def commands(command: click.Command, words: str) -> Iterator[tuple[str, str]]:
    """Each command, and its options."""
    yield words, " ".join(sorted(o for one in command.params for o in (*one.opts,)))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in sorted(command.list_commands(context)):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, f"{words} {name}")


def public_names() -> dict[str, Any]:
    from celery_toc.cli import toc
    from kombu_toc.client.options import _OPTIONS

    return {
        "names": {
            **{name: text for module in MODULES for name, text in names_of(module)},
            **dict(parts()),
        },
        "commands": dict(commands(toc, "celery toc")),
        "options": sorted(_OPTIONS),
    }


def main() -> None:
    FILE.write_text(json.dumps(public_names(), indent=1) + "\n")


if __name__ == "__main__":
    main()
