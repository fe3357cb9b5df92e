"""The command line: each command reads its options, runs a job and prints the result."""
