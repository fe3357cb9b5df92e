"""YAML that others wrote: read within limits, and without aliases, which can expand a small file
beyond any limit."""

from typing import Any

import yaml

LIMIT = 64 << 10  # characters, which took PyYAML 0.3 s
_DEPTH = 32


class _Loader(yaml.SafeLoader):
    """Refuses aliases and deep nesting before anything is built."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases; write what they stand for in full")
        self.depth += 1
        if self.depth > _DEPTH:
            raise yaml.YAMLError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def parse(text: str) -> Any:
    """Parse YAML. Raises `ValueError`, with a one-line reason, for text that is not YAML, is longer
    than `LIMIT`, has aliases or is nested deeply."""
    if len(text) > LIMIT:
        raise ValueError(f"it has more than {LIMIT:,} characters")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
