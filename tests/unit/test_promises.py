"""docs/promises.md names tests that there are, and every promise that a test cites."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "promises.md").read_text()
PROMISED, NOT_YET = PAGE.split("## Not promised yet")

ROWS = {
    id: re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    for id, tests in re.findall(r"^\| ([A-Z]\d+) \| .* \| (.*) \|$", PROMISED, re.MULTILINE)
}

#: How a docstring or a comment cites promises: alone, or several between commas.
CITED = re.compile(r"\b[AYWDKX]\d{1,2}\b")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def functions(file: Path) -> set[str]:
    return {node.name for node in tree(file).body if is_function(node)}


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def cited() -> set[str]:
    """The promises that the docstrings of the tests cite."""
    ids = set()
    for file in TESTS.rglob("test_*.py"):
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


def test_every_promise_that_a_test_cites_is_on_the_page() -> None:
    assert cited() - {*ROWS} == set()


def test_what_is_not_promised_yet_has_no_row() -> None:
    assert {*ROWS} & {*CITED.findall(NOT_YET)} == set()
