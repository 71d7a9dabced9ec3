"""examples/kubernetes with real processes: the commands, probes and hooks of its manifests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import yaml
from celery import Celery
from kombu import pools

from kombu_toc import TimeoutCenter

from ..support import nursery
from ..support.cluster import Cluster
from ..support.http_server import HttpServer
from ..support.nodes import ROOT
from ..support.ports import free_port
from ..support.servers import Server
from ..support.workers import wait_until

EXAMPLE = ROOT / "examples" / "kubernetes"
MANIFESTS = EXAMPLE / "manifests"

#: The app of the example with two more tasks.
APP = """
import time
from pathlib import Path

from shop import app


@app.task
def slow():
    Path("began").touch()
    while not Path("go").exists():
        time.sleep(0.02)
    Path("done").touch()


@app.task
def note():
    Path("noted").touch()
"""


def manifest(file: str, kind: str) -> dict[str, Any]:
    [found] = [
        one for one in yaml.safe_load_all((MANIFESTS / file).read_text()) if one["kind"] == kind
    ]
    return found


def container(file: str) -> dict[str, Any]:
    [found] = manifest(file, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


class Pod:
    """The worker's container: what the image has in it, its environment, and its commands."""

    def __init__(self, folder: Path, broker: str) -> None:
        self.folder = folder
        for file in (EXAMPLE / "image").glob("*.py"):
            shutil.copy(file, folder)
        (folder / "pod_shop.py").write_text(APP)
        self.alive = folder / "alive"
        # Its programs are those of this Python.
        programs = folder / "bin"
        programs.mkdir()
        for name, words in (("python", ""), ("celery", "-m celery")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            program.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            **nursery.importing(folder),
            "TOC_BROKER": broker,
            "ALIVE_FILE": str(self.alive),
        }
        self.log = folder / "worker.log"
        self.worker: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str]) -> None:
        command = [word.replace("--app=shop", "--app=pod_shop") for word in command]
        with open(self.log, "wb") as out:
            self.worker = self.begin(command, stdout=out, stderr=out)

    def begin(self, command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start a command of the manifest."""
        words = [word.replace("/tmp/alive", str(self.alive)) for word in command]
        return subprocess.Popen(words, cwd=self.folder, env=self.environment, **how)

    def passes(self, probe: str) -> bool:
        """Whether a probe of the manifest does."""
        return self.begin(container("worker.yaml")[probe]["exec"]["command"]).wait(30) == 0

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def said(self) -> str:
        return self.log.read_text()[-3000:]


@pytest.fixture
def pod(server: Server | Cluster, client: redis.Redis, tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path, server.toc_url)
    yield made
    (tmp_path / "go").touch()
    if made.worker is not None and made.worker.poll() is None:
        made.worker.send_signal(signal.SIGCONT)
        made.worker.terminate()
        made.worker.wait(60)


@pytest.fixture
def app(server: Server | Cluster, pod: Pod) -> Iterator[Celery]:
    with Celery("shop", broker=server.toc_url, set_as_current=False) as made:
        made.conf.task_default_queue = "mail"
        yield made
    pools.reset()


def test_a_worker_is_drained_before_it_is_stopped(
    pod: Pod, app: Celery, center: TimeoutCenter
) -> None:
    """It ends what it has begun, begins nothing more, and can be asked meanwhile."""
    pod.start(container("worker.yaml")["command"])
    app.send_task("pod_shop.slow")
    wait_until(lambda: pod.has("began"), 60, pod.said)
    drain = pod.begin(container("worker.yaml")["lifecycle"]["preStop"]["exec"]["command"])

    def is_paused() -> bool:
        replies = app.control.broadcast("toc", reply=True, timeout=1)
        return any(one.get("paused") for reply in replies for one in reply.values())

    wait_until(is_paused, 60, pod.said)
    app.send_task("pod_shop.note")
    [running] = (app.control.inspect(timeout=5).active() or {}).values()
    assert [one["name"] for one in running] == ["pod_shop.slow"]
    assert drain.poll() is None, "it does not wait for what runs"
    (pod.folder / "go").touch()
    assert drain.wait(60) == 0
    assert pod.has("done")
    assert pod.worker is not None
    pod.worker.terminate()
    assert pod.worker.wait(60) == 0
    assert not pod.has("noted")
    assert center.counts("mail").ready == 1, "it is for another pod"


def test_the_probes_see_a_worker_that_works_and_one_that_stands_still(pod: Pod) -> None:
    assert not pod.passes("startupProbe")
    pod.start(container("worker.yaml")["command"])
    wait_until(lambda: pod.passes("startupProbe"), 60, pod.said)
    assert pod.passes("readinessProbe")
    assert pod.passes("livenessProbe")
    assert pod.worker is not None
    pod.worker.send_signal(signal.SIGSTOP)
    minute = pod.alive.stat().st_mtime - 90  # as if it had been stopped for so long
    os.utime(pod.alive, (minute, minute))
    assert (pod.passes("readinessProbe"), pod.passes("livenessProbe")) == (False, True)
    long_ago = minute - 600
    os.utime(pod.alive, (long_ago, long_ago))
    assert (pod.passes("readinessProbe"), pod.passes("livenessProbe")) == (False, False)
    pod.worker.send_signal(signal.SIGCONT)
    wait_until(lambda: pod.passes("readinessProbe") and pod.passes("livenessProbe"), 60, pod.said)


@pytest.mark.one_server("its port is one at which nobody answers")
def test_a_container_that_is_started_again_is_not_ready_by_the_file_of_the_one_before(
    pod: Pod,
) -> None:
    """Its ``/tmp`` is the pod's."""
    pod.environment["TOC_BROKER"] = f"toc+redis://127.0.0.1:{free_port()}/0"
    pod.alive.touch()
    assert pod.passes("startupProbe")
    pod.start(container("worker.yaml")["command"])
    wait_until(lambda: not pod.passes("startupProbe"), 60, pod.said)
    wait_until(lambda: "Trying again" in pod.said(), 60, pod.said)
    assert not pod.passes("startupProbe")


@pytest.fixture
def secret(pod: Pod) -> str:
    """KEDA's token, by the command in the README; its hash is in the file ``tokens``."""
    readme = (EXAMPLE / "README.md").read_text()
    [make] = re.findall(r"^ *(python -m kombu_toc.http --new-token .*)$", readme, re.MULTILINE)
    [show] = re.findall(r"\$\((sed .* token)\)", readme)
    done = subprocess.run(
        ["sh", "-ec", f"{make}\n{show}"],
        cwd=pod.folder,
        env=pod.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def api(pod: Pod, secret: str) -> Iterator[HttpServer]:
    """The API by the command of its manifest."""
    _, _, *words = [
        word.replace("/etc/toc/tokens", str(pod.folder / "tokens"))
        for word in container("web.yaml")["command"]
        if not word.startswith("--port")
    ]
    with HttpServer(
        pod.environment["TOC_BROKER"],
        *words[2:],
        command=("-m", "celery", "--app=shop", "toc", "web"),
        environment=pod.environment,
    ) as made:
        yield made


def test_the_autoscaler_is_told_what_is_and_what_comes(
    api: HttpServer, secret: str, app: Celery, center: TimeoutCenter
) -> None:
    """By the URL, the place of the value and the token of its manifests."""
    [trigger] = manifest("scale.yaml", "ScaledObject")["spec"]["triggers"]
    url = urlsplit(trigger["metadata"]["url"])
    path = f"{url.path}?{url.query}"
    assert trigger["metadata"]["authMode"] == "bearer"
    bearer = {"authorization": f"Bearer {secret}"}

    def value() -> float:
        reply = api.get(path, headers=bearer)
        assert reply.status == 200, reply
        return float(reply.json[trigger["metadata"]["valueLocation"]])

    assert api.get(path).status == 401
    assert value() == 0, "nobody has sent anything yet"
    for countdown in (0, 0, 0, 120, 240, 7 * 86_400):
        app.send_task("shop.remind", (7,), countdown=countdown)
    assert value() == 5
    [taken] = center.pop("mail").messages
    assert value() == 5, "what is in flight counts"
    center.ack([taken])
    assert value() == 4
    # It is for this queue, and for looking only.
    assert api.get("/scale/sms", headers=bearer).status == 403
    sent = api.post("/v1/queues/mail/tasks", {"text": "x"}, headers=bearer)
    assert sent.status == 403


def test_the_probes_of_the_api_need_no_token(api: HttpServer) -> None:
    for probe in ("livenessProbe", "readinessProbe"):
        path = container("web.yaml")[probe]["httpGet"]["path"]
        # By the address of the pod, as the kubelet asks.
        assert api.get(path, headers={"host": "10.1.2.3:8088"}).status == 200
