from support.codec import source_on_cpu  # noqa: F401
