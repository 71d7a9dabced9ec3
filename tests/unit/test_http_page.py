"""docs/openapi.json is what the code says, and docs/http.md names every path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery import Celery

from celery_toc.web import api_for_app
from kombu_toc.http.app import OPERATIONS, document
from kombu_toc.http.fields import KINDS
from kombu_toc.http.request import ROLES, Router

ROOT = Path(__file__).parents[2]
WITH_APP = api_for_app(Celery("shop", broker="toc+redis://localhost:1/0", set_as_current=False))
PAGE = (ROOT / "docs" / "http.md").read_text()


def test_the_document_in_the_repository_is_that_of_the_code() -> None:
    """Else: celery -b toc+redis:// toc web --openapi >docs/openapi.json"""
    kept = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert kept == json.loads(json.dumps(WITH_APP.document))


def test_what_a_server_without_an_app_says_is_part_of_it() -> None:
    without = document(Router(OPERATIONS))["paths"]
    more = WITH_APP.document["paths"]
    assert {path: more[path] for path in without} == without
    others = more.keys() - without.keys()
    assert {path.split("/")[2] for path in others} == {"apps", "schedules"}


def test_every_field_of_every_body_has_a_type() -> None:
    def untyped(part: Any) -> Iterator[str]:
        members: Any = part if isinstance(part, list) else ()
        if isinstance(part, dict):
            members = part.values()
            for name, said in part.get("properties", {}).items():
                if not {"type", "$ref", "const"} & said.keys():
                    yield name
        for one in members:
            yield from untyped(one)

    assert list(untyped(WITH_APP.document)) == []


def test_every_operation_has_an_id_of_its_own() -> None:
    every = [
        one["operationId"] for path in WITH_APP.document["paths"].values() for one in path.values()
    ]
    assert len(every) == len(set(every)) > 40


def test_the_page_names_every_path_role_and_kind_of_problem() -> None:
    for one in WITH_APP.router.operations:
        if not one.is_shown:
            continue
        stem = "/" + "/".join(one.path)
        assert stem in PAGE, one.shown_path
        assert not one.verb or re.search(f":{one.verb}\\b", PAGE), one.shown_path
    for kind, (status, _) in KINDS.items():
        assert re.search(rf"^\|.*\b{status}\b.*`{kind}`", PAGE, re.MULTILINE), kind
    for role in ROLES:
        assert f"| `{role}` |" in PAGE
