"""examples/http: a client in Node.js that speaks HTTP."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kombu_toc import TimeoutCenter
from kombu_toc.http import new_token

from ..support.cluster import Cluster
from ..support.http_server import HttpServer
from ..support.servers import Server

EXAMPLE = Path(__file__).parents[2] / "examples" / "http"


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")
def test_the_example_puts_moves_cancels_and_handles_messages(
    server: Server | Cluster, center: TimeoutCenter
) -> None:
    secret, line = new_token("node", "read,write", "reminders")
    with HttpServer(server.toc_url, environment={"TOC_HTTP_TOKENS": line}) as api:
        done = subprocess.run(
            ["node", str(EXAMPLE / "remind.js"), api.url],
            env={"TOC_TOKEN": secret, "PATH": "/usr/bin:/bin:/usr/local/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    first, *handled = done.stdout.splitlines()
    assert first == "order-10: 404"
    assert sorted(handled) == [f"order-{order}: {int(order == 3)} failures" for order in range(10)]
    assert center.counts("reminders")._asdict() == dict.fromkeys(
        ("ready", "scheduled", "in_flight", "dead"), 0
    )


def test_the_client_has_about_a_hundred_lines_and_no_packages() -> None:
    text = (EXAMPLE / "toc.js").read_text()
    assert len(text.splitlines()) <= 120
    assert text.count("require(") == 2  # in the comment that shows how it is used, and node's own
