"""docs/django_tasks.md, as it stands: tasks of Django on a backend for Celery."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
import pytest
import redis

from kombu_toc import TimeoutCenter

from ..meta.test_readme import blocks_of
from ..support import nursery
from ..support.nodes import ROOT
from ..support.servers import Server
from ..support.workers import wait_until

pytestmark = [pytest.mark.versions, pytest.mark.one_server("the page names one server")]

PAGE = "docs/django_tasks.md"

#: What became of tasks, as Django knows it, when all but the first have ended: only of those that
#: have begun.
RESULTS = """
import sys
import time
import django
django.setup()
from django_tasks_fennel.compat import TaskResultDoesNotExist
from shop.tasks import remind

def become(id):
    try:
        result = remind.get_result(id)
    except TaskResultDoesNotExist:
        return "unknown"
    return f"{result.status} {result.return_value if result.status == 'SUCCESSFUL' else ''}"

deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    found = [become(id) for id in sys.argv[1:]]
    if all(one.startswith(("SUCCESSFUL", "FAILED")) for one in found[1:]):
        break
    time.sleep(0.2)  # Django is not told when a task has ended
print(*found, sep="\\n")
"""


class Project:
    """The project of the page in a folder, with programs that know it."""

    def __init__(self, folder: Path, server: Server) -> None:
        for block in blocks_of(PAGE):
            path = folder / block.splitlines()[0].removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            block = block.replace("redis://localhost:6379/0", server.url)
            if django.VERSION < (6, 0):
                block = block.replace("django.tasks import", "django_tasks import")
            path.write_text(block)
        [commands] = re.findall(r"^```sh\n(.*?)^```$", (ROOT / PAGE).read_text(), re.S | re.M)
        setting, self.worker, *self.commands = commands.splitlines()
        name, value = setting.removeprefix("export ").split("=")
        environment = {**os.environ, name: value, **nursery.importing(folder)}
        self.how: dict[str, Any] = {"cwd": folder, "env": environment}

    def run(self, command: str) -> list[str]:
        """The lines that a command of the page prints."""
        return nursery.done(words(command), **self.how).stdout.splitlines()


def words(command: str) -> list[str]:
    program, *rest = shlex.split(command)
    return [*(["-m", "celery"] if program == "celery" else []), *rest]


@pytest.fixture
def project(server: Server, client: redis.Redis, tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path, server)
    command = [*words(made.worker), "--pool", "solo"]
    with nursery.running(command, tmp_path / "worker.log", **made.how):
        yield made


def test_tasks_of_django_run_wait_fail_and_are_retried(
    project: Project, toc: TimeoutCenter
) -> None:
    send, list_, failures = project.commands
    later, done, failed = project.run(send)
    results = project.run(f"python -c {shlex.quote(RESULTS)} {later} {done} {failed}")
    assert results == ["unknown", "SUCCESSFUL order 8", "FAILED "]
    [waiting] = toc.scan("mail").messages
    assert waiting.id == later and waiting.time_us > toc.client.time()[0] * 1e6 + 3000e6
    assert any(later[:8] in line for line in project.run(list_))
    assert any("there is no order -9" in line for line in project.run(failures))
    [kept] = toc.failures.get(failed)
    assert (kept.task, kept.topic) == ("django_tasks:shop.tasks.remind", "default")
    assert toc.failures.retry(ids=[failed]).number == 1
    wait_until(lambda: [one.failed_us > kept.failed_us for one in toc.failures.get(failed)], 60)
