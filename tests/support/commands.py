"""Commands of ``celery toc``, run in this process."""

from __future__ import annotations

import json
from inspect import signature
from typing import Any

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_toc.cli import toc

#: Before Click 8.2, a runner keeps the two outputs apart only if it is told to.
APART = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}


class Answer:
    """What a command has said, and its exit code."""

    def __init__(self, result: Result) -> None:
        self.out, self.err, self.code = result.stdout, result.stderr, result.exit_code

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def fails(self, code: int, *words: str) -> None:
        """It has failed so, with one line on standard error that has these words."""
        assert self.code == code, (self.out, self.err)
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("Error: ")
        for word in words:
            assert word in self.err


def answer(app: Celery | None, *words: object) -> Answer:
    """Run a command on an app."""
    context = CLIContext(app=app, no_color=True, workdir=None)
    said = [str(word) for word in words]
    return Answer(CliRunner(**APART).invoke(toc, said, obj=context, catch_exceptions=False))
