"""A run of the tests leaves nothing behind, however it ends (./run-tests)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from ..support.nodes import ROOT
from ..support.workers import wait_until

#: Without what takes each process of a run a second to import.
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}

#: A test that starts a worker, a server, and a program that has left its parent and heeds no TERM.
TEST = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tests.support.servers import Server
from tests.support import nursery

def test_that_goes_on(tmp_path):
    server = Server(tmp_path).start()
    words = ["-b", server.toc_url, "worker", "-P", "prefork", "-c", "1", "-l", "INFO"]
    with open(tmp_path / "log", "wb") as log:
        nursery.Popen([sys.executable, "-m", "celery", *words], stdout=log, stderr=log)
    while b" ready." not in (tmp_path / "log").read_bytes():
        time.sleep(0.05)
    script = "trap '' TERM; (while :; do sleep 100; done) & echo"
    subprocess.run(["setsid", "sh", "-c", script], stdout=subprocess.DEVNULL)
    Path("begun").touch()
    time.sleep(100)
"""


def descendants(run: subprocess.Popen[bytes]) -> dict[psutil.Process, str]:
    """What a run has started, with their command lines: it adopts those that leave their parent."""
    found = {}
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process] = " ".join(process.cmdline())
    return found


def living(mark: str) -> list[str]:
    """The programs that have this in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("OF_THE_RUN") == mark:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.parametrize(
    "how",
    [*(pytest.param(how, marks=pytest.mark.nightly) for how in ("TERM", "INT")), "TERM to all"],
)
def test_who_ends_a_run_has_ended_all_that_it_started(tmp_path: Path, how: str) -> None:
    (tmp_path / "test_one.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    mark = uuid.uuid4().hex
    environment = {**os.environ, **PLAIN, "OF_THE_RUN": mark, "PYTHONPATH": str(ROOT)}
    with open(tmp_path / "log", "wb") as log:
        run = subprocess.Popen(
            [sys.executable, ROOT / "tests/support/run.py", "test_one.py"],
            **{"cwd": tmp_path, "env": environment, "start_new_session": True},
            **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log},
        )
    try:
        wait_until((tmp_path / "begun").exists, 60, (tmp_path / "log").read_text)
        started: dict[psutil.Process, str] = {}

        def all_are_there() -> bool:
            started.update(descendants(run))
            return all(
                any(name in line for line in started.values())
                for name in ("-m pytest", "worker", "-server", "sleep 100")
            )

        wait_until(all_are_there, 60, started)
        number = signal.SIGINT if how == "INT" else signal.SIGTERM
        if how == "TERM to all":
            os.killpg(run.pid, number)
        else:
            run.send_signal(number)
        assert run.wait(60) == 128 + number
        assert living(mark) == []
        # A server writes over its environment.
        assert [line for process, line in started.items() if process.is_running()] == []
    finally:
        run.kill()
        run.wait()


def test_what_runs_alone_has_a_junit_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import pytest\n\ndef test_beside(): ...\n\n@pytest.mark.alone\ndef test_alone(): ...\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    subprocess.run(
        [sys.executable, ROOT / "tests/support/run.py", "-q", "--junitxml=all.xml"],
        **{"cwd": tmp_path, "env": {**os.environ, **PLAIN, "PROCESSES": "1"}, "check": True},
        **{"stdout": subprocess.DEVNULL, "timeout": 120},
    )
    for name, test in (("all.xml", "test_beside"), ("all-alone.xml", "test_alone")):
        assert re.findall(r' name="(test_\w+)"', (tmp_path / name).read_text()) == [test]
