"""Writes the scripts for clients in other languages: ``python -m kombu_toc.scripts --help``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

from ..model.message import DICTIONARY
from ..version import __version__
from .reference import as_data


def main(arguments: list[str] | None = None) -> int:
    """Write the protocol as JSON, or each script into a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m kombu_toc.scripts",
        description="Write the Lua scripts of the timeout center as JSON, each with its SHA-1 and "
        "what its keys and arguments are: docs/protocol.md explains them.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="write NAME.lua for each script into this folder instead, and protocol.json without "
        "the texts",
    )
    folder: Path | None = parser.parse_args(arguments).folder
    data = {"version": __version__, "dictionary": DICTIONARY.decode("ascii"), **as_data()}
    if folder is None:
        print(json.dumps(data, indent=1))
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, script in cast("dict[str, dict[str, Any]]", data["scripts"]).items():
            (folder / f"{name}.lua").write_text(script.pop("text"), encoding="ascii")
        (folder / "protocol.json").write_text(json.dumps(data, indent=1) + "\n", encoding="ascii")
    except OSError as exc:
        print(f"cannot write into {folder}: {exc.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
