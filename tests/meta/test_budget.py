"""The code keeps within its budget, which may only fall."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_code_is_no_larger_than_its_budget() -> None:
    words = [sys.executable, str(ROOT / ".ci" / "size.py")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}take something away: CONTRIBUTING.md"
