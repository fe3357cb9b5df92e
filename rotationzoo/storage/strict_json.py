"""JSON and YAML from other people: read within limits, and the types of JSON validated."""

import json
import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rotationzoo.errors import RotationZooError
from rotationzoo.storage import files

LIMIT = 16 << 20  # bytes; an index entry has 400, an evaluation of the demo model 24,000
DEPTH = 32
YAML_LIMIT = 64 << 10  # characters, which took PyYAML 0.3 s
_HINT = "fetch or make it again"
_TOO_DEEP = "it is nested too deeply"
T = TypeVar("T")
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel, str_max_length=1 << 14):
    """A model of JSON's own types: text is not read as a number, numbers are finite, and texts are
    short. Unknown keys, which a later version may have written, are kept."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )


def parse(text: str | bytes, origin: str, hint: str = _HINT) -> Any:
    """Parse JSON in UTF-8. Raises `RotationZooError`, naming `origin`, for anything else, and for
    content that parsers read differently: duplicate keys, NaN, numbers out of range, nesting
    beyond 32 levels, lone surrogates."""
    try:
        content = json.loads(
            text,
            object_pairs_hook=_table,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_integer,
        )
        _check(content)
    except (ValueError, RecursionError) as error:
        reason = _TOO_DEEP if isinstance(error, RecursionError) else _first_line(error)
        raise RotationZooError(f"{origin} is damaged: not valid JSON: {reason}", hint) from error
    return content


def read(path: Path, hint: str = _HINT) -> Any:
    """The content of a regular JSON file of at most 16 MiB. Raises as `parse`."""
    return parse(files.read(path, LIMIT), str(path), hint)


def validate(kind: type[T], content: Any, origin: str, hint: str = _HINT) -> T:
    """Validate content against a type. Raises `RotationZooError`, naming `origin` and place."""
    try:
        return TypeAdapter(kind).validate_python(content, strict=True)
    except ValidationError as error:
        raise RotationZooError(f"{origin} is damaged: {first_problem(error)}", hint) from error


def first_problem(error: ValidationError) -> str:
    """Where content is wrong, and how."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part)[:80] for part in problem["loc"]) or "the whole"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


def check_schema(content: Any, known: int, origin: str, problem: str, hint: str) -> None:
    """Raise `RotationZooError` unless the content's `schema` is the `known` one. `problem`: the
    message for content without a schema."""
    schema = content.get("schema") if isinstance(content, dict) else None
    if type(schema) is not int:  # `isinstance` would accept a bool
        raise RotationZooError(f"{problem}: it is not a table with a schema", hint=hint)
    if schema != known:
        wrong = f"{origin} has schema {schema}; this rotationzoo reads schema {known}"
        raise RotationZooError(wrong, "upgrade rotationzoo")


def text(content: Any) -> bytes:
    """Write JSON that `parse` reads. Raises `RotationZooError` for a number that is not finite."""
    try:
        return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
    except ValueError as error:
        raise RotationZooError(f"the result cannot be written: {_first_line(error)}") from error


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return table


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:80]} is out of the range of float64")
    return number


def _integer(digits: str) -> int:
    if len(digits) > 19:  # before the conversion, which is slow for a very long number
        raise ValueError(f"{digits[:20]}... is out of the range of 64 bits")
    return int(digits)


def _check(content: Any) -> None:
    """Raise `ValueError` for nesting beyond `DEPTH` and for text that is not valid Unicode."""
    # Level by level, so that deep nesting cannot exhaust the stack.
    level = [content]
    for _ in range(DEPTH):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, str):
                node.encode()  # fails for half of a surrogate pair
            elif isinstance(node, dict):
                inner += [*node.keys(), *node.values()]
            elif isinstance(node, list):
                inner += node
        level = inner
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


class _Loader(yaml.SafeLoader):
    """Refuses aliases and deep nesting before anything is built."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases; write their content in full")
        self.depth += 1
        if self.depth > DEPTH:
            raise yaml.YAMLError(_TOO_DEEP)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse_yaml(text: str) -> Any:
    """Parse YAML. Raises `ValueError`, with a one-line reason, for text that is not YAML, is longer
    than `YAML_LIMIT`, is nested deeply, or has aliases, by which a small text grows without limit.
    """
    if len(text) > YAML_LIMIT:
        raise ValueError(f"it has more than {YAML_LIMIT:,} characters")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        raise ValueError(_first_line(error)) from error
