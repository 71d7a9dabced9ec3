"""The programs that tests fork from a nursery do what those do that are executed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from ..support import nursery
from ..support.nodes import ROOT
from ..support.servers import Server
from ..support.workers import wait_until

#: An app whose worker, and each process of its pool, says what it is.
APP = """
import gc, json, locale, logging, os, random, re, signal, sys, threading, warnings
import celery._state
from celery import Celery
from celery.signals import worker_ready
from kombu.transport import TRANSPORT_ALIASES

app = Celery("facts", broker=os.environ["BROKER"], backend=os.environ["BACKEND"])

def facts():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    consumer = sys.modules["celery.worker.consumer"].Consumer.Blueprint.default_steps
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "arguments": sys.argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "warnings": [sys.warnoptions, warnings.filters[:1] and warnings.filters[0][0]],
        "main": [sys.modules["__main__"].__name__, sys.modules["__main__"].__file__],
        "signals": [status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")],
        "mask": status["Umask"],
        "handlers": [repr(signal.getsignal(one)).split(" at ")[0] for one in range(1, 32)],
        # Without those of the timeout center, which come and go.
        "threads": sorted({one.name.split("-")[0] for one in threading.enumerate()} - {"toc"}),
        "group": os.getpgrp() == int(os.environ["GROUP"]),
        "files": [os.readlink(f"/proc/self/fd/{number}").split(":")[0] for number in range(3)],
        "streams": [
            [one.encoding, one.errors, one.line_buffering, one.write_through, one.name, one.mode]
            for one in (sys.__stdin__, sys.__stdout__, sys.__stderr__)
        ],
        "apps": sorted(str(one.main) for one in celery._state._get_active_apps()),
        "default": celery._state.default_app.main,
        "loggers": [type(one).__name__ for one in logging.getLogger().handlers],
        "level": logging.getLogger().level,
        "collector": [gc.isenabled(), gc.get_threshold()],
        "locale": locale.getlocale(),
        "schemes": sorted(name for name in TRANSPORT_ALIASES if name.startswith("toc")),
        "steps": sorted(str(one) for one in consumer),
        "settings": sorted(re.findall("[^(), ]+", app.conf.humanize(with_defaults=True))),
        "random": random.getrandbits(64),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }

@app.task
def told():
    return facts()

@worker_ready.connect
def ready(sender, **_):
    with open("ready.new", "w") as file:
        json.dump(facts(), file)
    os.rename("ready.new", "ready.json")
"""


class Told:
    """What a worker says of itself, and of a process of its pool, and in its log, and when it
    ends."""

    def __init__(
        self, start: Callable[..., subprocess.Popen[bytes]], server: Server, folder: Path, pool: str
    ) -> None:
        folder.mkdir()
        (folder / "facts.py").write_text(APP)
        environment = {
            **os.environ,
            **{"BROKER": server.toc_url, "BACKEND": server.url, "GROUP": str(os.getpgrp())},
            **{"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        }
        words = ["-A", "facts", "worker", "-P", pool, "-c", "1", "-n", "w@here", "-l", "INFO"]
        with open(folder / "log", "wb") as log:
            self.process = start(
                [sys.executable, "-m", "celery", *words, "--without-mingle"],
                **{"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL},
                **{"stdout": log, "stderr": log},
            )
        self.log = folder / "log"
        self.folder = folder
        try:
            self._ask(server)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def _ask(self, server: Server) -> None:
        ready = self.folder / "ready.json"
        wait_until(lambda: " ready." in self.log.read_text(), 60, self.log.read_text)
        wait_until(ready.exists, 60, self.log.read_text)
        self.main = json.loads(ready.read_text())
        with Celery(broker=server.toc_url, backend=server.url, set_as_current=False) as app:
            self.task = app.send_task("facts.told").get(timeout=60)
        self.process.send_signal(signal.SIGTERM)
        self.code = self.process.wait(60)

    def lines(self) -> list[str]:
        """Its log, without what differs from run to run."""
        text = self.log.read_text().replace(str(self.folder), "FOLDER")
        apart = r"[\d-]+ \d+:[\d:,]+|[\da-f]{8}-[\da-f-]{27}|0x[\da-f]+|succeeded in .*"
        text = re.sub(apart, "", text)
        return sorted(text.splitlines())


def same(facts: dict[str, Any], folder: Path) -> Any:
    """What has to be the same in two workers."""
    apart = ("random", "pid", "parent")
    shown = json.dumps({name: value for name, value in facts.items() if name not in apart})
    return json.loads(re.sub("0x[0-9a-f]+", "", shown.replace(str(folder), "FOLDER")))


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_forked_worker_is_as_one_that_was_executed(
    single_server: Server, client: Any, tmp_path: Path, pool: str
) -> None:
    executed = Told(subprocess.Popen, single_server, tmp_path / "executed", pool)
    forked, again = (
        Told(nursery.Popen, single_server, tmp_path / name, pool) for name in ("forked", "again")
    )
    assert type(forked.process) is nursery.Popen
    for one in (forked, again):
        assert same(one.main, one.folder) == same(executed.main, executed.folder)
        assert same(one.task, one.folder) == same(executed.task, executed.folder)
        assert one.main["pid"] == one.process.pid
        assert one.main["parent"] == executed.main["parent"] == os.getpid()
        assert one.code == executed.code == 0
        assert one.lines() == executed.lines()
    assert len({one.main["random"] for one in (executed, forked, again)}) == 3
    assert not psutil.pid_exists(forked.process.pid), "neither lives nor is a zombie"


AS_A_MODULE = (sys.executable, "-m", "celery")


def celery(start: Any, *words: str, program: tuple[object, ...] = AS_A_MODULE, **how: Any) -> Any:
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return start([*program, *words], **{**piped, **how})


@pytest.mark.parametrize(
    ("program", "words"),
    [
        pytest.param((nursery.CELERY,), ["toc", "--help"], id="script"),
        pytest.param(AS_A_MODULE, ["no-such-command"], id="module"),
        pytest.param(AS_A_MODULE, ["-A", "no_such_module", "toc", "status"], id="app"),
    ],
)
def test_a_forked_command_says_and_returns_what_an_executed_one_does(
    program: tuple[object, ...], words: list[str]
) -> None:
    executed, forked = (
        celery(run, *words, program=program, stdin=subprocess.DEVNULL)
        for run in (lambda *args, **how: subprocess.run(*args, **how), nursery.run)
    )
    assert forked.returncode == executed.returncode
    assert forked.stdout == executed.stdout
    assert forked.stderr == executed.stderr


@pytest.fixture
def top(single_server: Server) -> Iterator[Callable[..., nursery.Popen]]:
    """Start a command that goes on."""
    started = []

    def start(**how: Any) -> nursery.Popen:
        made = celery(nursery.Popen, "-b", single_server.toc_url, "toc", "top", **how)
        started.append(made)
        assert made.stdout.readline()
        return made

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_exit_code_of_a_forked_program_names_the_signal_that_ended_it(
    top: Callable[..., nursery.Popen], number: signal.Signals
) -> None:
    process = top()
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.send_signal(number)
    assert process.wait(10) == -number
    assert not psutil.pid_exists(process.pid)


def test_a_forked_program_is_in_the_session_that_was_asked_for(
    top: Callable[..., nursery.Popen],
) -> None:
    beside, apart = top(), top(start_new_session=True)
    assert (os.getpgid(beside.pid), os.getsid(beside.pid)) == (os.getpgrp(), os.getsid(0))
    assert os.getpgid(apart.pid) == os.getsid(apart.pid) == apart.pid


def test_a_folder_that_is_not_there_and_an_interpreter_of_another_kind_are_not_hidden(
    tmp_path: Path,
) -> None:
    """What no nursery can do is done by the interpreter that was asked for."""
    assert nursery.kind_of([sys.executable, "-m", "celery"], dict(os.environ)) == "celery"
    for name in ("PYTHONHASHSEED", "REMAP_SIGTERM", "SSL_CERT_FILE"):
        environment = {**os.environ, name: "7"}
        assert nursery.kind_of([sys.executable, "-m", "celery"], environment) is None
    assert nursery.kind_of([sys.executable, "-c", "import gevent"], dict(os.environ)) is None
    pool = [sys.executable, "-m", "celery", "worker", "-P", "gevent"]
    assert nursery.kind_of(pool, dict(os.environ)) is None
    with pytest.raises(FileNotFoundError):
        celery(nursery.Popen, "--version", cwd=tmp_path / "none")


#: Variables that name certificates.
CERTIFICATES = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"),
    *("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "NODE_EXTRA_CA_CERTS", "AWS_CA_BUNDLE"),
)

#: A program that forks a command, or executes it.
ASKING = """
import os, sys
from tests.support import nursery

process = nursery.Popen([sys.executable, "-m", "celery", "--version"], stdout=-1)
print("celery" in [kind for _, kind in nursery._nurseries], process.communicate()[0].decode())
"""


@pytest.mark.parametrize(
    "inherited",
    [
        # What makers of container images set, for a proxy that has a certificate of its own.
        pytest.param(
            dict.fromkeys(CERTIFICATES, "/etc/ssl/certs/ca-certificates.crt"),
            id="certificates",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"PYTHONHASHSEED": "7", "LANG": "C.UTF-8", "TZ": "UTC", "REMAP_SIGTERM": "SIGQUIT"},
            id="interpreter",
        ),
    ],
)
def test_what_the_environment_of_a_run_says_does_not_have_its_programs_executed(
    inherited: dict[str, str],
) -> None:
    environment = {**os.environ, **inherited, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ASKING], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("True 5."), done
