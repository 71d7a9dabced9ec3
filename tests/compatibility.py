"""Runs the tests in environments of tox, and writes docs/compatibility.md.

    python -m tests.compatibility                     those that tox alone runs
    python -m tests.compatibility -m pairs            those of a label
    python -m tests.compatibility py310-oldest-redis62 ...
    python -m tests.compatibility --table             only writes the page

Every result is kept in docs/compatibility.json as soon as it is there, in place of an older one
of the same environment; the page is made from them. tox and its environments need a network.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/compatibility.json"
PAGE = ROOT / "docs/compatibility.md"
TOX = [sys.executable, "-m", "tox"]

INTRODUCTION = """\
# What it runs with

| | oldest tested | newest tested |
|---|---|---|
{bounds}

Each row below is one run of the tests that depend most on versions (marked `versions`, at most
{smoke}), from the parts that meet Celery, Kombu and redis-py to workers, a Cluster and Sentinel.
The whole suite runs on one set of versions.

`pip install celery-toc` permits every combination. A star marks a redis-py that the extras of
Celery or Kombu (`celery[redis]`, `kombu[redis]`) exclude; it works with this transport.

Left out on purpose: Valkey 8.0.0 and 8.0.1, which refuse an UNSUBSCRIBE that Celery's Redis
result backend sends (Valkey's issue 1228). With Kombu 5.5 and 5.6, a Kombu `Producer` created with
`exchange=...` cannot publish again after it has lost its connection, with any transport.

`python -m tests.compatibility -m pairs` runs them, and writes this page.

"""

# What runs in an environment to tell what is in it: the server's version, then Python's packages.
PROBE = """
import importlib.metadata as m, json, platform, subprocess
from tests.support.servers import program
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
print(json.dumps({
    "python": platform.python_version(),
    **{name: version(name) for name in ("celery", "kombu", "redis", "hiredis")},
    "server": subprocess.check_output([program(), "--version"], text=True),
}))
"""


def run(environment: str) -> dict[str, Any]:
    """Run the tests there; what came out.

    failed: the tests that did, empty also if there was no run at all
    """
    with tempfile.TemporaryDirectory() as work:
        report = Path(work, "report.xml")
        command = [*TOX, "run", "-e", environment, "--", f"--junitxml={report}", "-q"]
        code = subprocess.run([*command, "-m", "versions"], cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    outcomes = {f"{case.get('classname')}.{case.get('name')}": _outcome(case) for case in cases}
    return {
        **_versions(environment),
        "date": datetime.date.today().isoformat(),
        "exit": code,
        "passed": list(outcomes.values()).count("passed"),
        "skipped": list(outcomes.values()).count("skipped"),
        "failed": sorted(name for name, outcome in outcomes.items() if outcome == "failed"),
    }


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def _versions(environment: str) -> dict[str, str]:
    """What is installed in the environment, and which server it tests with."""
    command = [*TOX, "exec", "-q", "-e", environment, "--", "python", "-c", PROBE]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    # tox says a word of its own too, even if it is to be quiet.
    versions = next(json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{")
    number = re.search(r"v=([\d.]+)", versions["server"])[1]
    # Valkey 7.2 does not give its name there.
    name = "Redis" if versions["server"].startswith("Redis") else "Valkey"
    return {**versions, "server": f"{name} {number}"}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The page."""
    rows = sorted(results.values(), key=lambda row: [order(row[key]) for key in KEYS])
    lines = [
        "| Python | Celery | Kombu | redis-py | hiredis | server | passed | failed | date |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        failed = ", ".join(row["failed"]) or ("no run" if row["exit"] else "-")
        star = "" if _asked_for(row["kombu"], row["redis"]) else " *"
        cells = [row["python"], row["celery"], row["kombu"], row["redis"] + star]
        cells += [row["hiredis"] or "-", row["server"], str(row["passed"]), failed, row["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    most = max((row["passed"] + row["skipped"] for row in rows), default=0)
    bounds = []
    for key, title in KEYS.items():
        for name in ("Redis ", "Valkey ") if key == "server" else ("",):
            versions = [row[key] for row in rows if row[key] and row[key].startswith(name)]
            if versions:
                oldest, newest = min(versions, key=order), max(versions, key=order)
                label = title or name.strip()
                bounds.append(
                    f"| {label} | {oldest.removeprefix(name)} | {newest.removeprefix(name)} |"
                )
    text = INTRODUCTION.format(bounds="\n".join(bounds), smoke=most)
    return text + "\n".join(lines) + "\n"


#: the columns of versions, and their titles among the bounds; the server has its own name
KEYS = {
    "python": "Python",
    "celery": "Celery",
    "kombu": "Kombu",
    "redis": "redis-py",
    "hiredis": "hiredis, if installed",
    "server": "",
}


def order(version: str) -> tuple[str, list[int]]:
    """By name, then by number: 8.10 is newer than 8.6."""
    return version.rpartition(" ")[0], [int(part) for part in re.findall(r"\d+", version)]


def _asked_for(kombu: str, redis: str) -> bool:
    """Whether Kombu's or Celery's own extra for Redis allows that redis-py."""
    version = order(redis)[1]
    at_least, below = {
        "5.3": ([4, 5, 2], [6]),
        "5.4": ([4, 5, 2], [6]),
        "5.5": ([4, 5, 2], [5, 2, 2]),
        "5.6": ([4, 5, 2], [6, 5]),
        "5.7": ([6, 4], [9]),
    }[".".join(kombu.split(".")[:2])]
    return at_least <= version < below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environments", nargs="*")
    parser.add_argument("-m", "--label")
    parser.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args()
    environments = options.environments
    if not environments and not options.table:
        command = [*TOX, "list", "--no-desc", "-q", *(["-m", options.label] * bool(options.label))]
        listed = subprocess.check_output(command, cwd=ROOT, text=True, env=os.environ).split()
        environments = [name for name in listed if name != "lint"]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for environment in environments:
        results[environment] = run(environment)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(table(results))
    PAGE.write_text(table(results))
    wrong = [name for name in environments if results[name]["exit"]]
    if wrong:
        raise SystemExit(f"failed: {' '.join(wrong)}")


if __name__ == "__main__":
    main()
