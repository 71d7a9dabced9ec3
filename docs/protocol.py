"""Writes what scripts are called with into docs/protocol.md: python docs/protocol.py

It is read from the heads of the scripts. The text before it is written by hand.
"""

from __future__ import annotations

from pathlib import Path

from kombu_toc.scripts.reference import PROTOCOL, as_markdown

PAGE = Path(__file__).with_suffix(".md")

#: Behind this line, the page is generated.
MARK = "<!-- What follows is generated: python docs/protocol.py -->\n"


def page(text: str) -> str:
    """The page with its generated part as it is to be now."""
    written, mark, _ = text.partition(MARK)
    if not mark:
        raise SystemExit(f"{PAGE} has lost the line {MARK!r}")
    return f"{written}{MARK}\nOf protocol {PROTOCOL}.\n\n{as_markdown()}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
