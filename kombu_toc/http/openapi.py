"""The OpenAPI document, made from the operations; ``python -m kombu_toc.http --openapi`` writes
it."""

from __future__ import annotations

from typing import Any

from ..version import __version__
from .fields import Object
from .operations import EVERYWHERE, PARAMETERS, ROLES, Operation, Router, statuses_of
from .problems import KINDS, SCHEMA

_ABOUT = """Messages that become visible at their action time, and tasks of Celery, for any
language. Errors are problems (RFC 9457). Times are RFC 3339, durations are seconds."""


def document(router: Router) -> dict[str, Any]:
    """The document of these operations."""
    schemas: dict[str, Any] = {"Problem": SCHEMA}
    paths: dict[str, dict[str, Any]] = {}
    for one in router.operations:
        if not one.is_shown:
            continue
        described = _described(one, schemas)
        paths.setdefault(one.shown_path, {})[one.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "celery-toc",
            "version": __version__,
            "description": " ".join(_ABOUT.split()),
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                f"Problem{status}": _problem(status, kinds)
                for status, kinds in statuses_of(KINDS).items()
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _problem(status: int, kinds: list[str]) -> dict[str, Any]:
    return {
        "description": " Or: ".join(f"{KINDS[kind][1]}." for kind in kinds),
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        },
    }


def _described(one: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": f"{one.run.__module__.rpartition('.')[2]}.{one.method.lower()}"
        f".{'.'.join(part.strip('{}') for part in one.path[1:]) or one.path[0]}"
        f"{'.' if one.verb else ''}{one.verb}",
        "summary": one.summary,
    }
    said = [one.about] if one.about else []
    if one.role:
        said.append(f"Needs the role {one.role}: {ROLES[one.role]}.")
        made["security"] = [{}, {"token": []}]
    made["description"] = " ".join(said)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": PARAMETERS[name].schema()}
        for name in one.parameters
    ]
    parameters += [
        {"name": name, "in": "query", "schema": kind.schema()} for name, kind in one.query.items()
    ]
    if one.idempotent_by_key:
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "A repeated request with the same key gets the same answer.",
                "schema": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 255,
                    "pattern": "^[!-~](?:[ -~]*[!-~])?$",
                },
            }
        )
    if parameters:
        made["parameters"] = parameters
    if one.request is not None:
        content = {"application/json": {"schema": _schema(one.request, schemas)}}
        content.update({name: {"schema": dict(schema)} for name, schema in one.media.items()})
        made["requestBody"] = {"required": one.required, "content": content}
    made["responses"] = {
        str(status): {
            "description": about,
            "content": {one.text or "application/json": {"schema": dict(schema)}},
        }
        for status, (about, schema) in one.answers.items()
    }
    kinds = [*EVERYWHERE, *one.problems] if one.role else ["bad-request", "broker", "internal"]
    if one.request is not None:
        kinds.append("unsupported-media-type")
    if one.idempotent_by_key:
        kinds += ["conflict", "key-reused"]
    for status in sorted(statuses_of(dict.fromkeys(kinds))):
        made["responses"][str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
    return made


def _schema(fields: Object, schemas: dict[str, Any]) -> dict[str, Any]:
    if not fields.name:
        return fields.schema()
    schemas[fields.name] = fields.schema()
    return {"$ref": f"#/components/schemas/{fields.name}"}
