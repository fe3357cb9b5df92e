"""The command line: each command reads its options, runs a job of the library and prints the
result."""
