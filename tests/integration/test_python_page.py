"""The examples of docs/python.md that need no app run as they stand, on one server and on a
Cluster."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_toc import TimeoutCenter

from .inspection import residue
from .test_readme import named


def test_the_example_of_receipts_runs(
    center: TimeoutCenter, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"center": center}
    exec(named("docs/python.md", "receipt = message.receipt"), names)
    length = len(names["receipt"])
    assert capsys.readouterr().out.splitlines() == [f"{length} toc1.", "1 []", "0 True"]
    stem = len("orders") + len("order-7")
    assert length < 4 / 3 * stem + 80
    assert residue(center.client) == []
