"""schemathesis asks the HTTP API for whatever its OpenAPI document allows, and for what it does
not. Each answer is one that the document has, none is a fault of the server, and what is wrong is
refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..support.cases import night
from ..support.http_server import HttpServer
from ..support.servers import Server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


APP = """
from celery import Celery

app = Celery("shop", broker={broker!r}, backend={backend!r})
"""


def check(api: HttpServer, document: dict[str, Any], folder: Path, examples: int) -> None:
    """Ask a server for what a document says.

    examples: how many requests each operation is sent
    """
    (folder / "openapi.json").write_text(json.dumps(document))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", str(folder / "openapi.json")),
            *("--url", api.url, "--checks", ",".join(CHECKS), "--phases", "fuzzing"),
            *("--max-examples", str(examples), "--seed", "1", "--workers", "2", "--no-color"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "Traceback" not in api.stop()
    assert "Selected: " in done.stdout


@pytest.mark.parametrize("examples", [2, night(6)])
def test_every_answer_is_as_the_document_says(
    single_server: Server, tmp_path: Path, examples: int
) -> None:
    """Of a server that knows Celery: it has every operation."""
    with single_server.client() as client:
        client.flushall()
    text = APP.format(broker=single_server.toc_url, backend=single_server.url)
    (tmp_path / "schemashop.py").write_text(text)
    with HttpServer(
        single_server.toc_url,
        *("--allow", "*"),
        command=("-m", "celery", "-A", "schemashop", "toc", "web"),
        environment={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
    ) as api:
        document = api.get("/openapi.json").json
        # What takes long by its nature is tested elsewhere.
        del document["components"]["schemas"]["Lease"]["properties"]["wait"]
        parameters = document["paths"]["/v1/queues/{queue}"]["delete"]["parameters"]
        parameters[:] = [one for one in parameters if one["name"] != "ifEmpty"]
        for operations in document["paths"].values():
            for operation in operations.values():
                for one in operation.get("parameters", ()):
                    if one["name"] == "app":  # any other one is not found
                        one["schema"] = {"type": "string", "enum": ["shop"]}
        check(api, document, tmp_path, examples)
