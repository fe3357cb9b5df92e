"""Orthogonal rotations for 2-bit key/value caches, calibrated on any causal language model.

>>> from rotationzoo import Artifact, RotatedCache, Rotations
>>> from rotationzoo import calibrate, evaluate, generate, pull

Importing this package is cheap: torch and transformers load when one of these names is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "Artifact",
    "RotatedCache",
    "Rotations",
    "__version__",
    "calibrate",
    "evaluate",
    "generate",
    "pull",
]

# Type checkers read these imports; at run time `__getattr__` makes them.
if TYPE_CHECKING:
    from rotationzoo.api import calibrate, evaluate, generate
    from rotationzoo.artifact.store import Artifact
    from rotationzoo.cache.rotated import RotatedCache
    from rotationzoo.rotations import Rotations
    from rotationzoo.zoo.pull import pull

_MODULES = {
    "Artifact": "rotationzoo.artifact.store",
    "RotatedCache": "rotationzoo.cache.rotated",
    "Rotations": "rotationzoo.rotations",
    "calibrate": "rotationzoo.api",
    "evaluate": "rotationzoo.api",
    "generate": "rotationzoo.api",
    "pull": "rotationzoo.zoo.pull",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = getattr(import_module(_MODULES[name]), name)
    globals()[name] = public  # the next use of the name does not come here
    return public


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
