"""The page of versions is made from results, not typed."""

from __future__ import annotations

import json

import pytest

from .. import compatibility


def test_the_page_says_what_the_results_do() -> None:
    """K11"""
    results = json.loads(compatibility.RESULTS.read_text())
    assert compatibility.PAGE.read_text() == compatibility.table(results)


@pytest.mark.parametrize("failed, told", [(["tests.unit.test_x.test_y"], "test_y"), ([], "no run")])
def test_what_failed_is_in_the_table(failed: list[str], told: str) -> None:
    [some, *_] = json.loads(compatibility.RESULTS.read_text()).values()
    row = compatibility.table({"one": {**some, "exit": 1, "failed": failed}}).splitlines()[-1]
    assert told in row


def test_versions_are_ordered_by_number() -> None:
    names = ["Redis 8.10.2", "Valkey 7.2.14", "Redis 8.6.3", "Redis 6.2.14"]
    found = sorted(names, key=compatibility.order)
    assert found == ["Redis 6.2.14", "Redis 8.6.3", "Redis 8.10.2", "Valkey 7.2.14"]
