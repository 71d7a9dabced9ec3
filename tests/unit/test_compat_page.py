"""docs/compat.md lists every use of private names, and which of them can be missed."""

from __future__ import annotations

import re
from pathlib import Path

import celery_toc.compat  # noqa: F401 - parts are known once they are imported
from kombu_toc.compat import kombu_channel, redis_connections, registry  # noqa: F401

PAGE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
TABLES = PAGE.split("## Optional")


def test_every_part_has_a_row() -> None:
    """A row as: | `part` | what it touches | without it | what to ask for upstream |"""
    parts = registry.parts()
    rows = [set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) for table in TABLES]
    assert rows[0] == {name for name, part in parts.items() if part.required}
    assert rows[1] == {name for name, part in parts.items() if not part.required}
