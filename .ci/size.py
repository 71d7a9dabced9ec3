"""Counts code lines: without blanks, comments and docstrings.

    python .ci/size.py          prints what there is, beside the budget
    python .ci/size.py --set    makes what there is the budget

`.ci/budget.json` has the budget, and tests/meta/test_budget.py compares. A budget only falls.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / ".ci" / "budget.json"
_EMPTY = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def python_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            prose.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _EMPTY:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def lua_lines(path: Path) -> int:
    lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    return sum(1 for line in lines if line and not line.startswith("--"))


def sizes(root: Path = ROOT) -> dict[str, int]:
    product = [path for name in ("kombu_toc", "celery_toc") for path in (root / name).rglob("*.py")]
    scripts = list((root / "kombu_toc").rglob("*.lua"))
    return {
        "Python lines": sum(map(python_lines, product)),
        "Python files": len(product),
        "Lua lines": sum(map(lua_lines, scripts)),
        "Lua files": len(scripts),
        "lines of tests": sum(map(python_lines, (root / "tests").rglob("*.py"))),
    }


def main() -> int:
    found = sizes()
    if "--set" in sys.argv[1:]:
        BUDGET.write_text(json.dumps(found, indent=2) + "\n")
    budget = json.loads(BUDGET.read_text())
    for name, number in found.items():
        print(f"{name:>15} {number:>7,} of {budget[name]:,}")
    return any(number > budget[name] for name, number in found.items())


if __name__ == "__main__":
    sys.exit(main())
