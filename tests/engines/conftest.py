from support.engine_artifacts import made  # noqa: F401
