"""One run: its peers, its measurements, and what is saved of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from . import environments, peers, plots, report
from .measure import CASES, MODULES, takes_part
from .peers import Peer
from .servers import RabbitNode, RedisServer

#: Packages whose versions belong to a result.
_NAMED = (
    *("celery", "celery-toc", "kombu", "redis", "valkey", "hiredis", "amqp", "billiard"),
    *("celery-redis-plus", "rq", "dramatiq", "arq", "saq", "huey"),
)

#: How often each measurement is made, in the long form and in the short one.
_ROUNDS = (3, 1)


def run(options: argparse.Namespace, folder: Path, pythons: dict[str, Path]) -> int:
    """Measure, print and save; the exit status."""
    if options.list:
        print("measurements:", ", ".join(CASES))
        print("peers:", ", ".join(peers.TITLES))
        return 0
    cases = _chosen(_expanded(options.only), list(CASES), "--only")
    if options.short and not options.only:
        left_out = [case for module in MODULES for case in getattr(module, "LONG", ())]
        cases = [case for case in cases if case not in left_out]
    names = _chosen(options.peers, list(peers.TITLES), "--peers")
    if options.before and not (options.before / "kombu_toc").is_dir():
        raise SystemExit(f"--before {options.before}: no checkout of celery-toc")
    if options.before is None:
        names = [name for name in names if name != "before"]
    elif "before" not in names:
        names.insert(1, "before")
    # Ends as Ctrl-C does: what was started is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    node = RabbitNode(folder / "rabbitmq")
    try:
        before = options.before and options.before.absolute()
        there, notes, versions = _peers(names, cases, folder, pythons, node, before)
        found = _start_of(options, there, notes, versions, node)
        if options.onto:
            _go_on_from(json.loads(options.onto.read_text()), found, cases)
        parts = [f"only-{options.only}"] * bool(options.only)
        parts += [f"peers-{options.peers}"] * bool(options.peers)
        results = folder / "results"
        results.mkdir(parents=True, exist_ok=True)
        base = results / "-".join(["short" if options.short else "full", *parts]).replace(",", "+")
        for _ in _measure(options, cases, there, found):
            _save(found, base)  # an interrupted run keeps what it has
    finally:
        node.stop()
        shutil.rmtree(folder / "rabbitmq", ignore_errors=True)
    print("\n" + report.text(found))
    for place in filter(None, (base, options.save)):
        _save(found, place)
        pictures = plots.draw(found, place)
        print("Saved:", ", ".join(map(str, (f"{place}.json", f"{place}.txt", *pictures))))
    return 1 if found["failures"] else 0


def _expanded(text: str | None) -> str | None:
    """What `--only` names: a part of the measurements stands for all of its cases."""
    if text is None:
        return None
    parts = {module.__name__.rpartition(".")[2]: module.CASES for module in MODULES}
    names = [name.strip() for name in text.split(",")]
    return ",".join(
        case for name in names for case in ([name] if name in CASES else parts.get(name, [name]))
    )


def _chosen(text: str | None, all_: list[str], option: str) -> list[str]:
    if not text:
        return all_
    chosen = [name.strip() for name in text.split(",")]
    unknown = [name for name in chosen if name not in all_]
    if unknown:
        raise SystemExit(f"{option}: {', '.join(unknown)}: not one of {', '.join(all_)}")
    return [name for name in all_ if name in chosen]


def _peers(
    names: list[str],
    cases: list[str],
    folder: Path,
    pythons: dict[str, Path],
    node: RabbitNode,
    before: Path | None,
) -> tuple[list[Peer], list[str], dict[str, dict[str, str]]]:
    """The peers that can take part, what to say of those that cannot, and versions."""
    there: list[Peer] = []
    notes: list[str] = []
    versions: dict[str, dict[str, str]] = {}
    for name in names:
        environment = peers.ENVIRONMENT[name]
        if not any(takes_part(peers.make(name, Path(), node, before), case) for case in cases):
            continue
        if name == "rabbitmq" and not RabbitNode.program():
            notes.append(
                "RabbitMQ is left out: rabbitmq-server is not on this machine "
                "(on Debian, 'apt-get install rabbitmq-server' as root)"
            )
            continue
        try:
            if environment not in pythons:
                pythons[environment] = environments.make(environment, folder)
        except environments.Missing as exc:
            notes.append(f"{peers.TITLES[name]} is left out: {exc}")
            continue
        there.append(peers.make(name, pythons[environment], node, before))
        if environment not in versions:
            all_ = environments.versions(pythons[environment])
            versions[environment] = {k: all_[k] for k in ("python", *_NAMED) if k in all_}
    for note in notes:
        print(note, flush=True)
    return there, notes, versions


def _start_of(
    options: argparse.Namespace,
    there: list[Peer],
    notes: list[str],
    versions: dict[str, dict[str, str]],
    node: RabbitNode,
) -> report.Run:
    servers = {"Redis peers": RedisServer.version()}
    if any(peer.name == "rabbitmq" for peer in there):
        servers["RabbitMQ"] = node.version()
    load = round(os.getloadavg()[0], 2)
    return {
        "form": "short" if options.short else "full",
        "machine": {
            "processors": os.cpu_count(),
            "model": _processor(),
            "memory_gb": round(psutil.virtual_memory().total / 2**30),
            "system": platform.platform(),
            "load": [load, load],
        },
        "servers": servers,
        "versions": versions,
        "titles": {peer.name: peer.title for peer in there},
        "notes": notes,
        "arguments": {},
        "cases": {},
        "failures": [],
    }


def _go_on_from(earlier: report.Run, found: report.Run, cases: list[str]) -> None:
    """Take over what an earlier run has measured, but for what is measured now."""
    if (earlier["form"], earlier["machine"]["model"]) != (found["form"], found["machine"]["model"]):
        raise SystemExit("--onto: that run was of another form, or made on another machine")
    for name in ("versions", "servers", "titles"):
        found[name] = {**earlier[name], **found[name]}
    for name in ("cases", "arguments"):
        found[name] = {k: v for k, v in earlier[name].items() if k not in cases}
    found["failures"] = [one for one in earlier["failures"] if one.partition(",")[0] not in cases]
    found["notes"] = list(dict.fromkeys((*earlier["notes"], *found["notes"])))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _measure(
    options: argparse.Namespace, cases: list[str], there: list[Peer], found: report.Run
) -> Any:
    """Measure everything into `found`, and yield after each measurement."""
    short = bool(options.short)
    for module in MODULES:
        # The cases of a module are compared with each other, so they take turns too.
        turn = [case for case in module.CASES if case in cases]
        if turn and hasattr(module, "notes"):
            found["notes"] = list(dict.fromkeys((*found["notes"], *module.notes())))
        rounds = options.rounds or getattr(module, "ROUNDS", _ROUNDS)[short]
        for number in range(rounds):
            for case in turn:
                arguments = module.CASES[case][short]
                found["arguments"][case] = arguments
                for peer in there:
                    if takes_part(peer, case):
                        label = f"{case}, {peer.title}, round {number + 1} of {rounds}"
                        result = _one(module, peer, arguments, label, found)
                        by_peer = found["cases"].setdefault(case, {})
                        by_peer.setdefault(peer.name, []).append(result)
                        found["machine"]["load"][1] = round(os.getloadavg()[0], 2)
                        yield


def _one(
    module: Any, peer: Peer, arguments: dict[str, Any], label: str, found: report.Run
) -> dict[str, Any] | None:
    began = time.monotonic()
    print(f"{label} ...", end=" ", flush=True)
    try:
        result = module.measure(peer, **arguments)
    except Exception as exc:  # the others are worth measuring still
        found["failures"].append(f"{label}: {type(exc).__name__}: {exc}")
        print(f"failed: {exc}", flush=True)
        return None
    measured = [name for name in module.METRICS if result.get(name) is not None]
    shown = ", ".join(f"{name} {report.number(result[name])}" for name in measured[:5])
    print(f"{shown} ({time.monotonic() - began:.0f} s)", flush=True)
    return result


def _save(found: report.Run, base: Path) -> None:
    base.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{base}.json").write_text(json.dumps(found, indent=1) + "\n")
    Path(f"{base}.txt").write_text(report.text(found))
