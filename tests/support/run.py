"""Runs pytest as ./run-tests does, and leaves no process behind, however it ends.

This process adopts whatever the tests' processes leave (workers, servers, databases), and ends it
after them. A TERM, a HUP or a Ctrl-C ends pytest first. The tests have a folder for what other
users must read, TOC_TEST_RUN, which is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Seconds that pytest may take to end when it is told to, and all others after it.
GRACE, REST = 15.0, 3.0

#: Options that say nothing of which tests run, and how many processes may run them.
PLAIN = {"-q", "-qq", "-v", "-vv", "-x", "-rs", "--nightly"}


class Run:
    """Commands one after the other, and what descends from them."""

    def __init__(self) -> None:
        self._told: list[int] = []
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._told.append(number))

    def pytest(self, *words: str) -> int:
        """Run it; its exit code, or that of a program that a signal has ended."""
        if self._told:
            return 128 + self._told[0]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words], preexec_fn=_end_with_the_parent
        )
        sent = 0
        deadline = float("inf")
        while process.poll() is None:
            if len(self._told) > sent:
                # As a Ctrl-C, which pytest has had from the terminal too: it says what has passed.
                # A second one does not wait for that.
                if sent or self._told[0] != signal.SIGINT or not os.isatty(0):
                    process.send_signal(signal.SIGKILL if sent else signal.SIGINT)
                deadline = min(deadline, time.monotonic() + GRACE)
                sent = len(self._told)
            if time.monotonic() > deadline:
                process.kill()
            _reap(but=process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        self.end_all()
        return 128 + self._told[0] if self._told else process.returncode % 256

    def end_all(self) -> None:
        """End every process that is left; one that does not end by a TERM is killed."""
        deadline = time.monotonic() + REST
        told: set[int] = set()
        while pids := descendants():
            late = time.monotonic() > deadline
            for pid in pids:
                if late or pid not in told:
                    told.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                        os.kill(pid, signal.SIGCONT)
            _reap()
            time.sleep(0.02)


def _reap(but: int | None = None) -> None:
    """Take note of children that have ended: of those that were adopted nobody else does."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == but:
                return
            os.waitpid(found.si_pid, 0)


def _end_with_the_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def descendants() -> list[int]:
    """The processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{name}/stat").read_text(errors="replace")
            parent = int(status.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    generation = [os.getpid()]
    while generation:
        generation = [child for pid in generation for child in children.get(pid, ())]
        found += generation
    return found


def run(arguments: list[str]) -> int:
    one = Run()
    if {*arguments} - PLAIN in ({"tests/unit"}, {"tests/unit/"}):
        # These wait for nothing: a process for each processor; and need no containers.
        words = ("-p", "no:celery", "-p", "no:docker_tools")
        return one.pytest("-n", "auto", "--dist", "loadgroup", *words, *arguments)
    if any(
        argument.startswith(("-m", "-n", "@")) or Path(argument.partition("::")[0]).exists()
        for argument in arguments
    ):
        return one.pytest(*arguments)
    processes = os.environ.get("PROCESSES") or str(3 * (os.cpu_count() or 1))
    # In the order of tests/: what takes longest comes first.
    several = ("-n", processes, "--dist", "loadgroup", "-m", "not alone")
    code = one.pytest(*several, *arguments)
    if code in (0, 1, 5):
        last = one.pytest("-m", "alone", *map(_apart, arguments))
        code = code if last == 5 else last or code  # 5: none was selected
    return code


def _apart(argument: str) -> str:
    """The argument for tests that run alone: their JUnit file is another one."""
    option, _, file = argument.partition("=")
    if option not in ("--junitxml", "--junit-xml"):
        return argument
    return f"{option}={Path(file).with_stem(Path(file).stem + '-alone')}"


def memory() -> str | None:
    """Where a run keeps its databases, if there is room for 4 GB: a disk takes five times as long
    to make hundreds of files."""
    with contextlib.suppress(OSError):
        there = os.statvfs("/dev/shm")
        if there.f_bavail * there.f_frsize > 1 << 32 and not there.f_flag & os.ST_NOEXEC:
            return "/dev/shm"
    return None


def main() -> int:
    with tempfile.TemporaryDirectory(
        prefix="toc-tests-", dir=memory(), ignore_cleanup_errors=True
    ) as folder:
        os.chmod(folder, 0o755)
        os.environ["TOC_TEST_RUN"] = folder
        return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
