"""What docs/notifier.md shows works as it is there."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kombu_toc import TimeoutCenter
from kombu_toc.notify import SecretsFile
from kombu_toc.notify.__main__ import main

from ..support.cluster import Cluster
from ..support.notifier import SECRET, NotifierProcess, Target
from ..support.ports import free_port
from ..support.servers import Server

PAGE = (Path(__file__).parents[2] / "docs" / "notifier.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block(kind: str, having: str) -> str:
    [found] = [text for one, text in BLOCKS if one == kind and having in text]
    return found


def test_the_first_example_and_the_receiver_work(
    server: Server | Cluster, center: TimeoutCenter, tmp_path: Path
) -> None:
    port = free_port()

    def here(text: str) -> str:
        text = text.replace("toc+redis://localhost:6379/0", server.toc_url)
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("delay=5", "delay=0.2")

    _, new_secret, run = here(block("sh", "--new-secret")).splitlines()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment["PYTHONPATH"] = f"{environment['PYTHONPATH']}:{os.environ.get('PYTHONPATH', '')}"
    subprocess.run(new_secret, shell=True, cwd=tmp_path, env=environment, check=True)
    secret = (tmp_path / "secrets.txt").read_text().split()[1]
    receiver = subprocess.Popen(
        [sys.executable, "-c", block("python", "class Hook")],
        env={**environment, "SECRET": secret, "PORT": str(port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    options = shlex.split(run)[3:]
    at = options.index("--secrets") + 1
    options[at] = str(tmp_path / options[at])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert receiver.poll() is None
        with NotifierProcess(server.toc_url, *options, secrets="", allow=""):
            exec(here(block("python", "center.put")), {})
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == '{"order": 7}\n'
    finally:
        receiver.kill()
        receiver.communicate()


def test_a_notifier_runs_in_an_event_loop_until_it_is_told_to_end(
    server: Server | Cluster, center: TimeoutCenter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secrets.txt").write_text(f"* {SECRET}\n")
    text = block("python", "async def send").replace("toc+redis://localhost:6379/0", server.toc_url)
    names: dict[str, Any] = {}
    exec(text, names)

    async def run() -> None:
        until = asyncio.Event()
        running = asyncio.create_task(names["send"](until))
        assert (await asyncio.to_thread(target.next)).id == "order-7"
        until.set()
        await running

    with Target() as target:
        center.queues.declare("mail", target=target.url)
        center.put("mail", "order-7", b"remind")
        asyncio.run(run())
    assert center.counts("mail") == (0, 0, 0, 0)


def test_the_lines_of_secrets_on_the_page_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "secrets.txt").write_text(block("", "whsec_"))
    secrets = SecretsFile(tmp_path / "secrets.txt").secrets
    assert secrets.of("https://shop.example.com/hook")
    assert secrets.of("https://a.example.com/hooks/1")
    assert secrets.of("https://a.example.com/other") is None


def test_every_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    options = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) - {"--help", "--version"}
    assert {"--secrets", "--allow", "--timeout"} < options
    assert [one for one in sorted(options) if one not in PAGE] == []
