"""The fields of requests and answers: each is read, checked and documented by one declaration.

A kind has ``schema()``, which is JSON Schema for the OpenAPI document, and ``read(value, at)``: the
value as it is used here. It raises a :class:`.Problem` that names the field by `at`, such as
``tasks[3].delay``.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from .problems import Problem, invalid

_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt]((?:[01]\d|2[0-3]):\d\d):(\d\d)(\.\d{1,9})?"
    r"([Zz]|[+-]\d\d:[0-5]\d)",
    re.ASCII,
)


def described(schema: dict[str, Any], about: str) -> dict[str, Any]:
    return {**schema, "description": about} if about else schema


# -- the schemas of answers

TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
FLAG: dict[str, Any] = {"type": "boolean"}
TIME: dict[str, Any] = {**TEXT, "format": "date-time"}
ANYTHING: dict[str, Any] = {"type": ["object", "array", "string", "number", "boolean", "null"]}


def or_null(schema: Mapping[str, Any], about: str = "") -> dict[str, Any]:
    return described({**schema, "type": [schema["type"], "null"]}, about)


def array(items: Mapping[str, Any], about: str = "") -> dict[str, Any]:
    return described({"type": "array", "items": items}, about)


def record(needed: str = "", /, **members: Mapping[str, Any]) -> dict[str, Any]:
    """An object of an answer.

    needed: names of members that it always has
    """
    made: dict[str, Any] = {"type": "object", "required": needed.split(), "properties": members}
    return {name: said for name, said in made.items() if said}


# -- what a field of a request may be


@dataclass(frozen=True)
class Text:
    """Text that UTF-8 can hold."""

    about: str = ""
    most: int = 1000
    least: int = 1
    choices: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        if self.choices:
            return described({"type": "string", "enum": list(self.choices)}, self.about)
        made: dict[str, Any] = {"type": "string", "minLength": self.least, "maxLength": self.most}
        return described(made, self.about)

    def read(self, value: Any, at: str) -> str:
        if not isinstance(value, str):
            raise invalid(at, "it must be a string")
        if self.choices and value not in self.choices:
            raise invalid(at, f"it must be one of {', '.join(self.choices)}")
        if not self.choices and not self.least <= len(value) <= self.most:
            raise invalid(at, f"it must have {self.least} to {self.most} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid(at, "it has half of a surrogate pair, which no UTF-8 can hold") from None
        return value


@dataclass(frozen=True)
class Number:
    """A number, or a whole number."""

    about: str = ""
    least: float = 0
    most: float = 1e10
    whole: bool = False
    default: float | None = None

    def schema(self) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "integer" if self.whole else "number"}
        made["minimum"] = int(self.least) if self.least == int(self.least) else self.least
        made["maximum"] = int(self.most) if self.most == int(self.most) else self.most
        if self.default is not None:
            made["default"] = self.default
        return described(made, self.about)

    def read(self, value: Any, at: str) -> Any:
        what = "a whole number" if self.whole else "a number"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise invalid(at, f"it must be {what}")
        if self.whole and isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one kind of number
        # No float holds a whole number of 400 digits: it is only compared.
        finite = isinstance(value, int) or math.isfinite(value)
        if not finite or (self.whole and not isinstance(value, int)):
            raise invalid(at, f"it must be {what}")
        if not self.least <= value <= self.most:
            raise invalid(at, f"it must be from {self.least:g} to {self.most:g}")
        return value

    def read_text(self, text: str, at: str) -> Any:
        """A number in a URL."""
        pattern = r"-?\d{1,15}" if self.whole else r"-?\d{1,15}(\.\d{1,9})?"
        if not re.fullmatch(pattern, text, re.ASCII):
            what = "a whole number" if self.whole else "a number"
            raise invalid(at, f"it must be {what}")
        return self.read(int(text) if self.whole else float(text), at)


@dataclass(frozen=True)
class Flag:
    """True or false."""

    about: str = ""
    default: bool = False

    def schema(self) -> dict[str, Any]:
        return described({"type": "boolean", "default": self.default}, self.about)

    def read(self, value: Any, at: str) -> bool:
        if not isinstance(value, bool):
            raise invalid(at, "it must be true or false")
        return value

    def read_text(self, text: str, at: str) -> bool:
        if text not in ("true", "false"):
            raise invalid(at, "it must be true or false")
        return text == "true"


@dataclass(frozen=True)
class Time:
    """A moment: RFC 3339, with an offset. Read, it is seconds since the epoch."""

    about: str = ""

    def schema(self) -> dict[str, Any]:
        return described({"type": "string", "format": "date-time"}, self.about)

    def read(self, value: Any, at: str) -> float:
        found = _TIME.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise invalid(
                at, "it must be a time as in RFC 3339, with an offset: 2026-01-31T09:30:00Z"
            )
        day, minute, second, fraction, offset = found.groups()
        zone = "+00:00" if offset in "Zz" else offset
        leap = second == "60" and minute.endswith("59")
        try:
            moment = datetime.fromisoformat(f"{day}T{minute}:{'59' if leap else second}{zone}")
            seconds = (moment - _EPOCH) / timedelta(seconds=1) + leap
        except (ValueError, OverflowError):
            raise invalid(at, f"there is no such time as {value}") from None
        return max(seconds + float(fraction or 0), 0.0)

    def read_text(self, text: str, at: str) -> float:
        return self.read(text.replace(" ", "+"), at)  # a plus that was not encoded


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def shown_time(us: int) -> str | None:
    """Microseconds since the epoch as a time; None for none, and for what is beyond all times."""
    try:
        moment = _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if us else None


@dataclass(frozen=True)
class Base64:
    """Bytes, in base64."""

    about: str = ""

    def schema(self) -> dict[str, Any]:
        made = {"type": "string", "contentEncoding": "base64", "pattern": _BASE64.pattern}
        return described(made, self.about)

    def read(self, value: Any, at: str) -> bytes:
        try:
            if not isinstance(value, str) or not _BASE64.fullmatch(value):
                raise ValueError
            return base64.b64decode(value, validate=True)
        except ValueError:
            raise invalid(at, "it must be bytes in base64, with its padding") from None


_BASE64 = re.compile(r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")


@dataclass(frozen=True)
class Anything:
    """Any JSON."""

    about: str = ""
    of: tuple[str, ...] = ()  #: the types of JSON that it may have
    also: Mapping[str, Any] = field(default_factory=dict)  #: what else its schema says

    def schema(self) -> dict[str, Any]:
        made = {"type": list(self.of)} if self.of else {}
        return described({**made, **self.also}, self.about)

    def read(self, value: Any, at: str) -> Any:
        kind = _type_of(value)
        if kind == "number" and "integer" in self.of and value == int(value):
            return value
        if self.of and kind not in self.of:
            raise invalid(at, f"it must be {' or '.join(self.of)}, not {kind}")
        return value


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


@dataclass(frozen=True)
class Headers:
    """Names and what they say."""

    about: str = ""
    most: int = 100

    def schema(self) -> dict[str, Any]:
        made = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 10_000}}
        return described({**made, "maxProperties": self.most}, self.about)

    def read(self, value: Any, at: str) -> dict[str, str]:
        if not isinstance(value, dict):
            raise invalid(at, "it must be an object")
        if len(value) > self.most:
            raise invalid(at, f"it must have {self.most} members at most")
        said = Text(most=10_000, least=0)
        return {said.read(name, at): said.read(value[name], f"{at}.{name}") for name in value}


@dataclass(frozen=True)
class Listed:
    """A list of one kind."""

    of: Any
    about: str = ""
    most: int = 1000
    least: int = 1

    def schema(self) -> dict[str, Any]:
        made = {"type": "array", "items": self.of.schema(), "minItems": self.least}
        return described({**made, "maxItems": self.most}, self.about)

    def read(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list):
            raise invalid(at, "it must be a list")
        if not self.least <= len(value) <= self.most:
            raise invalid(at, f"it must have {self.least} to {self.most} members")
        read = self.of.read
        return [read(one, f"{at}[{place}]") for place, one in enumerate(value)]


@dataclass(frozen=True)
class Object:
    """An object with these fields and no others.

    needed: those that must be there
    one_of: of these exactly one must be there
    at_most_one: of these at most one may be there
    """

    fields: Mapping[str, Any]
    needed: Sequence[str] = ()
    one_of: Sequence[str] = ()
    at_most_one: Sequence[str] = ()
    about: str = ""
    name: str = ""  #: of its schema in the document; empty: it has none of its own

    def schema(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "type": "object",
            "properties": {name: kind.schema() for name, kind in self.fields.items()},
            "additionalProperties": False,
        }
        if self.needed:
            made["required"] = list(self.needed)
        if self.one_of:
            made["oneOf"] = [{"required": [name]} for name in self.one_of]
        if self.at_most_one:
            made["not"] = {"required": list(self.at_most_one)}
        return described(made, self.about)

    def read(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise invalid(at, "it must be an object")
        stem = f"{at}." if at else ""
        fields = self.fields
        if not value.keys() <= fields.keys():
            name = min(value.keys() - fields.keys())
            known = ", ".join(fields) or "none"
            raise invalid(f"{stem}{name[:100]!a}".replace("'", ""), f"unknown; there are: {known}")
        for name in self.needed:
            if name not in value:
                raise invalid(stem + name, "it is missing")
        if self.one_of and sum(name in value for name in self.one_of) != 1:
            raise Problem(
                "invalid-field",
                f"{at or 'the body'}: say exactly one of {', '.join(self.one_of)}",
                at or self.one_of[0],
            )
        if self.at_most_one and sum(name in value for name in self.at_most_one) > 1:
            said = f"say at most one of {', '.join(self.at_most_one)}"
            raise invalid(stem + self.at_most_one[1], said)
        return {name: fields[name].read(one, stem + name) for name, one in value.items()}
