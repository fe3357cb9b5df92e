"""Model hubs in memory on the loopback interface, for the unmodified client libraries to talk to.

A hub turns a `Call` into an `Answer` without a socket, so that a fault can spoil any answer.
"""
