"""schemathesis asks the HTTP API for whatever its OpenAPI document allows, and for what it does
not. Each answer is one that the document has, none is a fault of the server, and what is wrong is
refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ..http_server import HttpServer
from ..servers import Server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


def test_every_answer_is_as_the_document_says(single_server: Server, tmp_path: Path) -> None:
    with single_server.client() as client:
        client.flushall()
    with HttpServer(single_server.toc_url) as api:
        document = api.get("/openapi.json").json
        # What takes long by its nature is tested elsewhere.
        del document["components"]["schemas"]["Lease"]["properties"]["wait"]
        parameters = document["paths"]["/v1/queues/{queue}"]["delete"]["parameters"]
        parameters[:] = [one for one in parameters if one["name"] != "ifEmpty"]
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", str(tmp_path / "openapi.json")),
                *("--url", api.url, "--checks", ",".join(CHECKS), "--phases", "fuzzing"),
                *("--max-examples", "6", "--seed", "1", "--workers", "2", "--no-color"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        said = api.stop()
    assert "Traceback" not in said
    assert "Selected: " in done.stdout
