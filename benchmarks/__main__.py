"""Measures celery-toc beside its peers, in one run and with the same work.

It sets up what it needs below a folder of its own, goes through the measurements, one peer after
the other and all of that again for each round, and prints and saves a table and all numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import environments

#: Set when this runs in the environment that has the product.
_READY = "BENCH_READY"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run-benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="less of everything: some ten minutes")
    parser.add_argument(
        "--only",
        metavar="CASE,...",
        help="these measurements, or parts such as library; see --list",
    )
    parser.add_argument("--peers", metavar="PEER,...", help="these peers; see --list")
    parser.add_argument(
        "--before",
        metavar="FOLDER",
        type=Path,
        help="another checkout of celery-toc, such as a git worktree of an earlier commit; it is "
        "measured beside this one",
    )
    parser.add_argument("--rounds", type=int, help="how often, instead of each one's own number")
    parser.add_argument(
        "--folder", type=Path, default=Path(".benchmarks"), help="for all it makes (.benchmarks)"
    )
    parser.add_argument(
        "--env",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="use this virtual environment as it is; NAME is one of "
        + ", ".join(environments.NEEDS),
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="a copy: FILE.json and FILE.txt")
    parser.add_argument(
        "--onto", metavar="FILE.json", type=Path, help="add to this earlier run of the same form"
    )
    parser.add_argument("--list", action="store_true", help="list measurements and peers")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    folder = options.folder.absolute()
    given = dict(text.partition("=")[::2] for text in options.env)
    unknown = set(given) - set(environments.NEEDS)
    if unknown:
        raise SystemExit(f"--env: no such environment: {', '.join(sorted(unknown))}")
    pythons = {name: Path(path).absolute() / "bin" / "python" for name, path in given.items()}
    if _READY not in os.environ:
        # What measures is in the product's environment, and so is this from here on.
        try:
            python = pythons.get("toc") or environments.make("toc", folder)
        except environments.Missing as exc:
            raise SystemExit(str(exc)) from None
        environment = {**os.environ, _READY: "1"}
        os.execve(python, [str(python), "-m", "benchmarks", *sys.argv[1:]], environment)
    from .run import run

    return run(options, folder, pythons)


if __name__ == "__main__":
    sys.exit(main())
