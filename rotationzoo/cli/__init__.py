"""The command line: every command reads its options, hands a job to the package that does it, and
prints the result with its view."""
