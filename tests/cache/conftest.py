from support.float64 import float64  # noqa: F401
