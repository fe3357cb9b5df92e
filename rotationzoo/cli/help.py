"""The page of `--help`: plain text in groups, common options first and those for experts last."""

import inspect
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.core import TyperCommand

_GROUPS = {
    "Text": "chat max_new_tokens data subset split column packing tokens length lengths seed tasks "
    "questions",
    "Model and machine": "revision device dtype device_map max_memory batch rope_scaling",
    "Signatures": "signers issuer require_signature trust_config sign adopt_index",
    "For experts (--for picks most)": "feedback bits key_bits value_bits format rounding sink "
    "recent windows clip pooled rivals uncentered layers keys_only values_only prefill_chunk "
    "prefill_layout real_cache drift queries engine_hadamard absorb absorbed",
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names.split()}
_VALUES = {int: "N", float: "N", str: "TEXT", Path: "PATH"}


class Command(TyperCommand):
    """A command whose options are shown in the groups of `_GROUPS`, after all others."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and then each group of options."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        groups |= {name: [] for name in _GROUPS}
        for parameter in self.get_params(ctx):
            if getattr(parameter, "hidden", False):
                continue
            group = _GROUP_OF.get(parameter.name, "Options")
            if parameter.param_type_name == "argument":
                group = "Arguments"
            groups[group].append(self._row(parameter))
        for name, rows in groups.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)

    def _row(self, parameter: Any) -> tuple[str, str]:
        """A parameter as it is typed, and what it does."""
        kinds = self._kinds(parameter.name)
        words = [parameter.help or ""]
        if parameter.default not in (None, False, ()):
            words.append(f"({parameter.default})")
        choices = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
        if choices:
            words[0] = f"{words[0].removesuffix('.')}: {', '.join(choices[0])}."
        if parameter.param_type_name == "argument":
            return parameter.metavar or parameter.name.upper(), " ".join(words)
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        values = [_VALUES[kind] for kind in kinds if kind in _VALUES]
        value = parameter.metavar or "".join(["NAME"] if choices else values[:1])
        return f"{names} {value}".strip(), " ".join(words)

    def _kinds(self, name: str) -> tuple[Any, ...]:
        """The types of a parameter of the command's function."""
        known = inspect.signature(self.callback).parameters if self.callback else {}
        if name not in known:
            return ()
        kind = get_args(known[name].annotation)[0]
        return (kind, *get_args(kind))
