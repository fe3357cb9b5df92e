"""How an option is declared: once, in a class of settings for Python and the command line."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, Self, TypeVar, Union, get_args, get_origin

from rotationzoo.errors import UsageError
from rotationzoo.words import nearest

P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")


def about(help: str, *names: str, argument: bool = False, kind: Any = None, **more: Any) -> Any:
    """A field on the command line: its `help`; its `names`, by default the field's own; its `kind`,
    a type or a parser, by default the field's type; and `more` for Typer."""
    return {"help": help, "names": names, "argument": argument, "kind": kind, "more": more}


def option(help: str, *names: str, default: Any = None, **more: Any) -> Any:
    """An option of a class of settings or of a command, as `about` describes it."""
    return field(default=default, metadata=about(help, *names, **more))


def flag(help: str, *names: str) -> Any:
    """An option without a value."""
    return option(help, *names, default=False)


def argument(help: str, default: Any = ..., **more: Any) -> Any:
    """An argument of a command; without a default, it is required."""
    return option(help, default=default, argument=True, **more)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options; None means the default. Raises `UsageError` for a value that is not a choice."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), _choices_of(each.type)
            if value is None and each.default is not MISSING:
                object.__setattr__(self, each.name, each.default)
            elif choices and value not in (None, *choices):
                problem = f"there is no {each.name} {value!r}{nearest(str(value), choices)}"
                raise UsageError(problem, hint=f"give one of {', '.join(choices)}")

    def complete(self, **defaults: Any) -> Self:
        """The same, with these values for options that were not given."""
        unset = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **unset)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """One value or several as a tuple, None as the empty tuple."""
    if value is None:
        return ()
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(value) if several else (value,)


def _plain(kind: Any) -> Any:
    """The type without the option of an `Annotated`."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _choices_of(kind: Any) -> tuple[str, ...]:
    """The words of a `Literal`, maybe with None."""
    kind = _plain(kind)
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = [part for part in parts if get_origin(part) is Literal]
    return get_args(words[0]) if words and {*parts} <= {*words, NoneType} else ()


def takes(settings: Callable[P, S]) -> Callable[[Callable[[S], R]], Callable[P, R]]:
    """Let a function of settings take their fields as arguments, with a `TypeError` for others."""
    assert isinstance(settings, type)
    # The class's own options before those of its bases.
    names = [name for each in settings.__mro__ for name in inspect.get_annotations(each)]
    known = inspect.signature(settings).parameters
    parameters = [each.replace(annotation=_plain(each.annotation)) for each in known.values()]
    parameters.sort(key=lambda each: (each.kind, names.index(each.name)))

    def spread(function: Callable[[S], R]) -> Callable[P, R]:
        result = inspect.signature(function).return_annotation
        signature = inspect.Signature(parameters, return_annotation=result)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                meant = [nearest(name, known) for name in kwargs.keys() - known]
                raise TypeError(f"{function.__name__}() {error}{''.join(meant)}") from None
            return function(settings(*args, **kwargs))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return spread
