"""The CUDA sources, and the one table of programs: which kernels a source has, and what each takes.

`check` compares both sides when a program is compiled, so a wrong name, order or type is never
launched.
"""

import re
from importlib.resources import files
from itertools import zip_longest
from types import NoneType
from typing import Any, get_args, get_type_hints

from rotationzoo.codec.kernels import latent_parameters, parameters

# Each argument has 64 bits: a pointer, an integer or a double.
_NUMBERS = {int: "Count", float: "double"}
_INTEGERS = {"long long": "Count", "Address": "Count"}
PROGRAMS: dict[str, dict[str, type[tuple[Any, ...]]]] = {
    "int2.cu": {"quantize": parameters.Quantize, "dequantize": parameters.Dequantize},
    "attention.cu": {
        "prepare": parameters.Prepare,
        "attend": parameters.Attend,
        "finish": parameters.Finish,
        "finish_many": parameters.Finish,
    },
    "latents.cu": {
        "scale_queries": latent_parameters.ScaleQueries,
        "attend_latents": latent_parameters.AttendLatents,
        "merge_latents": latent_parameters.MergeLatents,
    },
    "many_heads.cu": {"attend_many_heads": latent_parameters.AttendLatents},
    "server_step.cu": {"plan": parameters.Plan},
    "store.cu": {
        "copy_rows": parameters.CopyRows,
        "store": parameters.Store,
        "store_exact": parameters.StoreExact,
    },
    "restore.cu": {"restore_rows": parameters.RestoreRows, "gather": parameters.Gather},
    "segments.cu": {
        "store_segments": parameters.StoreSegments,
        "store_few_segments": parameters.StoreFewSegments,
        "restore_segments": parameters.RestoreSegments,
    },
}
"""Source -> its kernels, and what each takes. Kernels of files that it includes are not listed."""

_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\([^()]*\) )?(\w+)\(([^()]*)\)'
)


def read(source: str) -> str:
    """The text of a program, with each included file in place of its first `#include`. So NVRTC
    needs no folder, and its cache misses no change."""
    seen = {source}

    def include(found: re.Match[str]) -> str:
        if found[1] in seen:
            return ""
        seen.add(found[1])
        return _INCLUDE.sub(include, source_of(found[1]))

    return _INCLUDE.sub(include, source_of(source))


def source_of(name: str) -> str:
    """The text of one source."""
    return files(__name__).joinpath(name).read_text("utf-8")


def check(source: str) -> None:
    """Compare the kernels of a source with the table. Raises `TypeError`, which names both sides,
    at the first name, order or type that differs."""
    kernels, table = dict(_KERNEL.findall(source_of(source))), PROGRAMS[source]
    if kernels.keys() != table.keys():
        both = ", ".join(kernels), ", ".join(table)
        raise TypeError(f"{source} has the kernels {both[0]}, and its table {both[1]}")
    for name, arguments in table.items():
        declared = [_declared(each) for each in kernels[name].split(",")]
        for theirs, ours in zip_longest(declared, fields_of(arguments), fillvalue="nothing more"):
            if theirs != ours:
                raise TypeError(
                    f"{name} in {source} takes {theirs}, where {arguments.__name__} has {ours}"
                )


def _declared(parameter: str) -> str:
    """The type and name of a parameter, without what a caller need not know."""
    *words, name = (word for word in parameter.split() if word not in ("const", "__restrict__"))
    type = " ".join(words)
    return f"{_INTEGERS.get(type, type)} {name}"


def fields_of(arguments: type) -> list[str]:
    """The types and names of the parameters that a kernel with these arguments takes."""
    listed = []
    for name, hint in get_type_hints(arguments, include_extras=True).items():
        kind = get_args(hint)[0] if NoneType in get_args(hint) else hint
        if hasattr(kind, "_fields"):
            parts = (each.rpartition(" ") for each in fields_of(kind))
            listed += [f"{type} {name}_{inner}" for type, _, inner in parts]
        else:
            type = _NUMBERS.get(kind) or kind.__metadata__[0]
            listed.append(f"{type} {name}")
    return listed
