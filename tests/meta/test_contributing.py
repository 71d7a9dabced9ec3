"""The guide for contributors names what there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()

#: What is there only after it was made.
MADE = (".venv/", ".benchmarks/", "../", "/")


def test_every_file_that_the_guide_names_is_there() -> None:
    named = re.findall(r"[\w./-]*/[\w./-]*\w|\.?[\w-]+\.(?:md|cfg|yaml)", GUIDE)
    here = {path.removeprefix("./") for path in named if not path.startswith(MADE)}
    assert {"tests/unit", ".pre-commit-config.yaml", ".ci/release"} <= here
    assert [path for path in sorted(here) if not (ROOT / path).exists()] == []
