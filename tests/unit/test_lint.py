"""What is linted with, in CI and before a commit."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_a_commit_is_linted_with_what_ci_lints_with() -> None:
    pinned = ROOT.joinpath(".ci", "lint.txt").read_text().split()
    config = yaml.safe_load(ROOT.joinpath(".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format"}
    for hook in hooks:
        assert hook["additional_dependencies"] == pinned
