"""Tables of values in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from .loops import in_loop

#: As `pytest.param`, a case of the night.
night = functools.partial(pytest.param, marks=pytest.mark.nightly)


def each(
    names: str | tuple[str, ...], values: Iterable[Any], ids: Any = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test, which shows each row that fails.

    For tests of values: what a row leaves behind, the next one finds.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    rows = list(values)
    if not callable(ids):
        named = list(ids or rows)
    elif len(arguments) > 1:
        named = ["-".join(filter(None, map(ids, row))) for row in rows]
    else:
        named = list(map(ids, rows))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        wanted = inspect.signature(test).parameters

        @functools.wraps(test)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            if "subtests" in wanted:
                fixtures["subtests"] = subtests
            for row, name in zip(rows, named, strict=True):
                with subtests.test(ascii(name)):
                    given = row if len(arguments) > 1 else [row]
                    made = test(**fixtures, **dict(zip(arguments, given, strict=True)))
                    if inspect.iscoroutine(made):
                        in_loop(made)

        rest = [one for name, one in wanted.items() if name not in (*arguments, "subtests")]
        first = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*rest, first])  # type: ignore[attr-defined]
        return run

    return decorate
