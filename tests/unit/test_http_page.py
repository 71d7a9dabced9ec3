"""docs/openapi.json is what the code says, and docs/http.md names every path."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kombu_toc.http.app import OPERATIONS
from kombu_toc.http.openapi import document
from kombu_toc.http.operations import ROLES, Router
from kombu_toc.http.problems import KINDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "http.md").read_text()


def test_the_document_in_the_repository_is_that_of_the_code() -> None:
    """Else: python -m kombu_toc.http --openapi >docs/openapi.json"""
    kept = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert kept == json.loads(json.dumps(document(Router(OPERATIONS))))


def test_every_operation_has_an_id_of_its_own() -> None:
    every = [
        one["operationId"]
        for path in document(Router(OPERATIONS))["paths"].values()
        for one in path.values()
    ]
    assert len(every) == len(set(every)) > 30


def test_the_page_names_every_path_role_and_kind_of_problem() -> None:
    for one in OPERATIONS:
        stem = "/" + "/".join(one.path)
        assert stem in PAGE, one.shown_path
        assert not one.verb or re.search(f":{one.verb}\\b", PAGE), one.shown_path
    for kind, (status, _) in KINDS.items():
        assert re.search(rf"^\|.*\b{status}\b.*`{kind}`", PAGE, re.MULTILINE), kind
    for role in ROLES:
        assert f"| `{role}` |" in PAGE
