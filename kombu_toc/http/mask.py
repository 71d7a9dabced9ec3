"""What is not shown: arguments whose names say so, or all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote

from ..errors import ConfigurationError
from .tokens import matches

#: What is shown instead.
HIDDEN = "••••"

#: Characters that a hidden value has at least if it is looked for in errors; what is shorter than
#: the second is looked for where it stands alone only: it is found everywhere.
_TELLING = 3
_ANYWHERE = 4

#: Characters by which the beginning of a hidden value is known: errors shorten what is long.
_BEGINNING = 8

#: An error of which nothing is known but its text: its type.
_TYPE = re.compile(r"[A-Za-z_][\w.]*(?=:|$)")

#: How deep arguments are looked through; what is deeper is hidden as a whole.
_DEPTH = 30

#: Names of the parameters of a task, in order; None if they are not known.
Parameters = Callable[[str], Sequence[str] | None]


class Mask:
    """Hides arguments.

    patterns: names of arguments, of members of objects and of headers, or patterns of these with
        ``*`` and ``?``, in any case; ``*`` hides all arguments
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(one.lower() for one in patterns)
        self.hides_all = "*" in self.patterns
        self._named = tuple(one for one in self.patterns if one != "*")

    @classmethod
    def of(cls, said: Any) -> Mask:
        """The mask that a setting asks for: true, a name, or a list of names. Raises
        ConfigurationError."""
        if said in (None, False):
            return cls()
        if said is True:
            return cls(("*",))
        names = [said] if isinstance(said, str) else said
        if isinstance(names, (list, tuple, set, frozenset)) and all(
            isinstance(one, str) and one for one in names
        ):
            return cls(names)
        raise ConfigurationError(
            f"toc_web_mask must be true, or names of arguments such as ['password', '*token*'], "
            f"not {said!r}"
        )

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def hides(self, name: str) -> bool:
        return matches(name.lower(), self.patterns)

    def hides_header(self, name: str) -> bool:
        """Whether a header is hidden: ``*`` is about arguments, and leaves what a message is."""
        if name in _OPEN:
            return False
        return matches(name.lower(), self._named) or (self.hides_all and name not in _ABOUT)

    def error(self, text: str) -> str:
        """An error of a message whose arguments are not known: its type, and no more of it."""
        if not self or not text:
            return text
        lines = [line for line in text.splitlines() if line.strip()]
        found = _TYPE.match(lines[-1].strip()) if lines else None
        return HIDDEN if found is None else f"{found[0]}: {HIDDEN}"


class Masking:
    """Hides the arguments of one message, and remembers what was hidden.

    parameters: names of the parameters of a task
    """

    def __init__(self, mask: Mask, parameters: Parameters) -> None:
        self._mask = mask
        #: of a message whose arguments are not known
        self.error = mask.error
        self._parameters = parameters
        self._hidden: set[str] = set()

    def args(self, task: str | None, args: Any) -> Any:
        """Positional arguments. Without names for them, all are hidden."""
        mask = self._mask
        if not mask or not args:
            return args
        names = None if task is None or mask.hides_all else self._parameters(task)
        if not isinstance(args, (list, tuple)) or names is None:
            return self.hide(args)
        rest = [""] * max(len(args) - len(names), 0)
        return [
            self.hide(value) if not name or mask.hides(name) else self.value(value)
            for name, value in zip((*names, *rest), args, strict=False)
        ]

    def kwargs(self, kwargs: Any) -> Any:
        """Arguments by name."""
        if not self._mask or not kwargs:
            return kwargs
        return self.value(kwargs) if isinstance(kwargs, dict) else self.hide(kwargs)

    def members(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, with each name."""
        if self._mask.hides_all:
            return {name: self.hide(value) for name, value in kwargs.items()}
        return {
            name: self.hide(value) if self._mask.hides(name) else self.value(value)
            for name, value in kwargs.items()
        }

    def value(self, value: Any, depth: int = 0) -> Any:
        """A value whose members may have to be hidden."""
        if not self._mask:
            return value
        if self._mask.hides_all or depth > _DEPTH:
            return self.hide(value)
        if isinstance(value, dict):
            task = value.get("task")
            is_task = isinstance(task, str) and "args" in value
            made = {}
            for name, one in value.items():
                if self._mask.hides(str(name)):
                    made[name] = self.hide(one)
                elif is_task and name == "args":
                    made[name] = self.args(task, one)
                else:
                    made[name] = self.value(one, depth + 1)
            return made
        if isinstance(value, (list, tuple)):
            return [self.value(one, depth + 1) for one in value]
        return value

    def headers(self, headers: dict[str, Any]) -> dict[str, Any]:
        """Headers: those that repeat arguments are left out where something is hidden."""
        if not self._mask:
            return headers
        mask = self._mask
        return {
            name: self.hide(value)
            if mask.hides_header(name)
            else value
            if mask.hides_all
            else self.value(value)
            for name, value in headers.items()
            if name not in _REPEATING
        }

    def properties(self, properties: dict[str, Any]) -> dict[str, Any]:
        """What else a message has: ``*`` is about arguments."""
        mask = self._mask
        if not mask or mask.hides_all:
            return properties
        return {
            name: self.hide(value) if mask.hides(name) else self.value(value)
            for name, value in properties.items()
        }

    def text(self, text: str) -> str:
        """An error, or a key, in which what was hidden may stand: as it is, or as it is written in
        Python, in JSON or in a URL, or its beginning."""
        if not self._hidden or not text:
            return text
        forms = {form for one in self._hidden for form in _forms(one)}
        for form in sorted(forms, key=len, reverse=True):
            if len(form) < _ANYWHERE:
                text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", HIDDEN, text)
            else:
                text = _without(text, form)
        return text

    def result(self, value: Any, *, is_known: bool) -> Any:
        """What a task has returned: members of objects by their names, and texts.

        is_known: whether the arguments of the task are known, and :meth:`args` and :meth:`kwargs`
            have hidden some: texts are shown without these. Otherwise a text may repeat any of
            them, and is shown only where it is a member, which has a name
        """
        return self._result(self.value(value), is_known) if self._mask else value

    def _result(self, value: Any, is_shown: bool, depth: int = 0) -> Any:
        if depth > _DEPTH:
            return self.hide(value)
        if isinstance(value, dict):
            return {name: self._result(one, True, depth + 1) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._result(one, is_shown, depth + 1) for one in value]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return HIDDEN if str(value) in self._hidden else value
        if not isinstance(value, str):
            return value
        if value[:1] in ("{", "["):  # perhaps JSON in a text
            try:
                inner = json.loads(value)
            except (ValueError, RecursionError):
                inner = None
            if isinstance(inner, (dict, list)):
                masked = self._result(self.value(inner), is_shown, depth + 1)
                return value if masked == inner else json.dumps(masked, ensure_ascii=False)
        return self.text(value) if is_shown else HIDDEN

    def hide(self, value: Any) -> Any:
        """A value that is not shown, nor where an error repeats it."""
        self._note(value, 0)
        return HIDDEN

    def _note(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            members: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple)):
            members = value
        elif value is None or isinstance(value, bool):
            return
        else:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
            for said in (text, *text.splitlines()):
                if len(said) >= _TELLING and len(self._hidden) < 1000:
                    self._hidden.add(said)
            return
        if depth < _DEPTH:
            for one in members:
                self._note(one, depth + 1)


#: Headers of Celery's that repeat arguments.
_REPEATING = ("argsrepr", "kwargsrepr")

#: Headers of Celery's that say what a message is, and are always shown.
_OPEN = (
    "id",
    "task",
    "lang",
    "eta",
    "expires",
    "retries",
    "timelimit",
    "root_id",
    "parent_id",
    "group",
    "origin",
)

#: Headers of which the same is true, and which hold what their sender has put there: a pattern that
#: names them hides them.
_ABOUT = (*_OPEN, "x-biz-id", "x-biz-type", "x-key")


def _forms(value: str) -> Iterable[str]:
    """How a value is written in errors."""
    return {
        value,
        repr(value)[1:-1],
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        quote(value, errors="replace"),
    }


def _without(text: str, hidden: str) -> str:
    """Text without a value, and without what begins as it does."""
    head = hidden[:_BEGINNING]
    at = text.find(head)
    if at < 0:
        return text
    parts, done = [], 0
    while at >= 0:
        end = at + len(head)
        for one in hidden[_BEGINNING:]:
            if text[end : end + 1] != one:
                break
            end += 1
        parts += [text[done:at], HIDDEN]
        done = end
        at = text.find(head, done)
    return "".join((*parts, text[done:]))
