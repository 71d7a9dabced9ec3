"""docs/promises.md names tests that there are, and every promise that a test cites; each is held by
a test that runs by day, and each test of the night by another of the day."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "promises.md").read_text()

ROWS = {
    id: re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    for id, tests in re.findall(r"^\| ([A-Z]\d+) \| .* \| (.*) \|$", PAGE, re.MULTILINE)
}

#: How a docstring or a comment cites promises: alone, or several between commas.
CITED = re.compile(r"\b[AYWDKX]\d{1,2}\b")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def functions(file: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (\w+)", file.read_text(), re.MULTILINE))


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def decorators(file: Path, name: str) -> list[str]:
    """Those of a test, and its module's marks: what makes all of its cases tests of the night."""
    found = []
    for node in tree(file).body:
        if is_function(node) and node.name == name:
            found += [ast.unparse(one) for one in node.decorator_list]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found.append(ast.unparse(node.value))
    return found


def runs_by_day(file: Path, name: str) -> bool:
    """Whether a test of the file has that name, and runs by day in a case at least. (A test whose
    cases are all nightly is refused by tests/conftest.py.)"""
    if "nightly" not in file.read_text():
        return name in functions(file)  # without a look at its tree, which takes long
    marks = decorators(file, name)
    return name in functions(file) and not any(
        "mark.nightly" in one.partition("(")[0] for one in marks
    )


def guards() -> Iterator[tuple[str, str]]:
    """The name of a file, and the test that it names as guard of one of its tests."""
    for file in TESTS.rglob("test_*.py"):
        if "guarded_by=" in file.read_text():
            for node in ast.walk(tree(file)):
                if isinstance(node, ast.keyword) and node.arg == "guarded_by":
                    yield file.name, ast.literal_eval(node.value)


def cited() -> set[str]:
    """The promises that the docstrings of the tests cite."""
    ids = set()
    for file in TESTS.rglob("test_*.py"):
        if not CITED.search(file.read_text()):
            continue
        for node in (tree(file), *tree(file).body):
            if isinstance(node, ast.Module) or is_function(node):
                ids.update(CITED.findall(ast.get_docstring(node) or ""))
    return ids


def test_every_promise_is_held_by_tests_that_there_are() -> None:
    assert len(ROWS) > 40
    for id, tests in ROWS.items():
        assert tests, f"no test is named for {id}"
        for file, name in tests:
            assert (TESTS / file).is_file(), f"{id}: there is no tests/{file}"
            assert name in functions(TESTS / file), f"{id}: there is no {name} in tests/{file}"


def test_every_promise_is_held_by_a_test_that_runs_by_day() -> None:
    by_day = {
        id for id, tests in ROWS.items() for one in tests if runs_by_day(TESTS / one[0], one[1])
    }
    assert {*ROWS} - by_day == set()


def test_what_runs_at_night_is_guarded_by_a_test_that_runs_by_day() -> None:
    found = list(guards())
    for where, guard in found:
        path, _, name = guard.partition("::")
        file = TESTS.parent / path
        assert file.is_file(), f"{where}: there is no {path}"
        assert runs_by_day(file, name.partition("[")[0]), f"{where}: {guard} does not run by day"


def test_the_promises_that_tests_cite_are_those_on_the_page() -> None:
    """So no row is lost, and none stands for a test that knows nothing of it."""
    assert cited() == {*ROWS}
