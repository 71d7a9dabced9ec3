"""Counts code lines, without blanks, comments and docstrings, and statements.

    python .ci/size.py          prints what there is, beside the budget
    python .ci/size.py --set    makes what there is the budget

`.ci/budget.json` has the budget. What is larger ends .ci/run with an error: a budget only falls.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / ".ci" / "budget.json"

#: A comment or a string, whichever begins first.
_TEXT = re.compile(
    r"""#[^\n]*|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)


def python_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in _statements(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            prose.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = _TEXT.sub(_counted, source).split("\n")
    return sum(1 for number, line in enumerate(lines, 1) if line.strip() and number not in prose)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield from _statements(child)


def _counted(found: re.Match[str]) -> str:
    """Nothing of a comment; of a string all lines, for they are what it says."""
    return "" if found[0][0] == "#" else re.sub("(?m)^[ \t]*$", "text", found[0])


def python_statements(path: Path) -> int:
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in _statements(ast.parse(path.read_text(encoding="utf-8")))
    )


def lua_lines(path: Path) -> int:
    lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    return sum(1 for line in lines if line and not line.startswith("--"))


def sizes(root: Path = ROOT) -> dict[str, int]:
    product = [path for name in ("kombu_toc", "celery_toc") for path in (root / name).rglob("*.py")]
    scripts = list((root / "kombu_toc").rglob("*.lua"))
    return {
        "Python lines": sum(map(python_lines, product)),
        "Python statements": sum(map(python_statements, product)),
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
        print(f"{name:>17} {number:>7,} of {budget[name]:,}")
    return any(number > budget[name] for name, number in found.items())


if __name__ == "__main__":
    sys.exit(main())
