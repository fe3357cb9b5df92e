from support.codec import compile_program, programs_on_cpu  # noqa: F401
