"""Methods and options of a facade that are those of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Delegate(Generic[P, R]):
    """A method that a part has: ``get = Delegate("lookup", Lookup.get)``.

    Of an instance it is the bound method of that part, so that a call costs no further layer; of
    the class it is the part's function, with its signature and docstring.
    """

    def __init__(self, part: str, method: Callable[Concatenate[Any, P], R]) -> None:
        self._part = part
        self._name = method.__name__
        self._method = method

    @overload
    def __get__(self, facade: None, owner: type) -> Callable[Concatenate[Any, P], R]: ...

    @overload
    def __get__(self, facade: object, owner: type) -> Callable[P, R]: ...

    def __get__(self, facade: object | None, owner: type) -> Callable[..., R]:
        if facade is None:
            return self._method
        bound: Callable[P, R] = getattr(getattr(facade, self._part), self._name)
        return bound


class Option(Generic[T]):
    """An option that a part has: ``limits: Option[Limits] = Option("context", "limits")``."""

    def __init__(self, part: str, name: str) -> None:
        self._part = part
        self._name = name

    @overload
    def __get__(self, facade: None, owner: type) -> Option[T]: ...

    @overload
    def __get__(self, facade: object, owner: type) -> T: ...

    def __get__(self, facade: object | None, owner: type) -> Option[T] | T:
        if facade is None:
            return self
        value: T = getattr(getattr(facade, self._part), self._name)
        return value

    def __set__(self, facade: object, value: T) -> None:
        setattr(getattr(facade, self._part), self._name, value)
