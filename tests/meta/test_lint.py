"""What is linted with, in CI and before a commit; and which tests may look inside."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]

#: How many tests may use private names (SLF001, pyproject.toml), and how often. They only fall.
FILES, TIMES = 54, 227


def allowed() -> list[str]:
    return re.findall(
        r'^"(tests/[^"]+)" = \["SLF001"\]', (ROOT / "pyproject.toml").read_text(), re.M
    )


def private_names(file: str) -> list[str]:
    """The private names of others that a file uses."""
    return [
        node.attr
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.Attribute)
        and re.match("_[^_]", node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def test_a_commit_is_linted_with_what_ci_lints_with() -> None:
    pinned = ROOT.joinpath(".ci", "lint.txt").read_text().split()
    config = yaml.safe_load(ROOT.joinpath(".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format"}
    for hook in hooks:
        assert hook["additional_dependencies"] == pinned


def test_fewer_and_fewer_tests_use_private_names() -> None:
    files = allowed()
    assert [file for file in files if not private_names(file)] == [], "take them from the list"
    assert len(files) <= FILES
    assert sum(len(private_names(file)) for file in files) <= TIMES
