"""``python -m tests.chaos``: see the package."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from pathlib import Path

import psutil

from . import library, soak
from .modes import MODES
from .run import BROKERS, FAMILIES, TRANSPORTS, Run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="see tests/chaos")
    parser.add_argument("--seconds", type=float, default=60, help="how long faults go on (60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=TRANSPORTS, default="toc")
    parser.add_argument("--broker", choices=BROKERS, default="redis")
    parser.add_argument("--tasks-per-second", type=float, default=12, metavar="N")
    parser.add_argument("--faults", help="families (all that the broker has)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the report, for programs")
    parser.add_argument("--python", default=sys.executable, help="of workers and producers")
    parser.add_argument("--directory", type=Path, help="where logs are to stay")
    parser.add_argument(
        "--library",
        nargs="?",
        const="through",
        choices=list(MODES),
        help="with a task library, and how queues are declared there (through)",
    )
    parser.add_argument("--soak", action="store_true", help="everything on, a fault every 20 s")
    kinds = ",".join(MODES["through"].engines)
    parser.add_argument("--engines", help=f"of the library's databases ({kinds})")
    options = parser.parse_args()
    if options.broker != "redis" and options.transport != "toc":
        parser.error(f"--transport {options.transport} has no --broker {options.broker}")
    if options.library and (options.broker, options.transport) != ("redis", "toc"):
        parser.error("--library is for one server")
    if options.soak:
        options.library = options.library or "through"
    families = library.FAMILIES if options.library else FAMILIES[options.broker]
    families = soak.FAMILIES if options.soak else families
    faults = options.faults.split(",") if options.faults else list(families)
    for name in faults:
        if name not in families:
            parser.error(f"no such fault: {name!r}; there are {', '.join(families)}")
    # What is started is ended by what unwinds.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        how = {
            "seed": options.seed,
            "seconds": options.seconds,
            "rate": options.tasks_per_second,
            "families": faults,
            "python": options.python,
        }
        if options.library:
            how["engines"] = options.engines.split(",") if options.engines else None
            kind = soak.SoakRun if options.soak else library.LibraryRun
            report = kind(directory, mode=options.library, **how).run()
        else:
            how |= {"transport": options.transport, "broker": options.broker}
            report = Run(directory, **how).run()
    print(report.table())
    if options.json:
        options.json.write_text(json.dumps(vars(report), indent=2))
    return 0 if report.faultless else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        for child in psutil.Process().children(recursive=True):  # what was just being started
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
