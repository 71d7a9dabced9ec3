"""docs/tutorial.md is gone through as it stands, block by block, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

from ..support import nursery
from ..support.ports import free_port
from ..support.workers import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()

#: What is shown, in its order. What installs has no kind, and is done already.
BLOCKS = re.findall(r"^```(python|sh|text)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.one_server("the page has a server of its own")
def test_the_tutorial_goes_as_the_page_says(tmp_path: Path) -> None:
    """X7"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    how = {"cwd": tmp_path, "env": {**environment, "PYTHONWARNINGS": "ignore"}}
    log, port, printed, said = tmp_path / "log", free_port(), "", dict[str, str]()
    with ExitStack() as servers, log.open("wb") as out:

        def run(command: str) -> str:
            program, *words = shlex.split(command)
            words = [sys.executable, *(["-m", "celery"] if program == "celery" else []), *words]
            if "worker" in words or "web" in words:
                words += ["--port", str(port)] if "web" in words else []
                process = nursery.Popen(words, **how, stdout=out, stderr=out)
                servers.callback(process.wait, 60)
                servers.callback(process.terminate)
                return ""
            done = nursery.run(words, **how, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            return done.stdout

        for kind, text in BLOCKS:
            if kind == "python":
                name = text.splitlines()[0].removeprefix("# ")
                (tmp_path / name).write_text(text.replace("/tmp/shop", f"{tmp_path}/server"))
            elif kind == "text":
                assert printed == text
            else:
                if "toc status" in text:
                    wait_until(lambda: "remind 7" in log.read_text(), 40, log.read_text)
                said |= {command: run(command) for command in text.splitlines()}
                printed = said[text.splitlines()[-1]]
        assert "order-8" in said["celery -A shop toc list"]
        assert "remind" in said["celery -A shop toc show order-8"]
        assert "order 9 has no card" in said["celery -A shop toc failures list"]
        address = ("127.0.0.1", port)
        wait_until(lambda: socket.socket().connect_ex(address) == 0, 40, log.read_text)
        assert urlopen(f"http://127.0.0.1:{port}/healthz").status == 200
        assert "remind 8" not in log.read_text()
