from support.codec import compile_encoder, source_on_cpu  # noqa: F401
