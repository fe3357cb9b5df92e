"""Several small decompositions at a time: each keeps only one core of a CPU busy."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Input = TypeVar("Input")
Output = TypeVar("Output")


def start_in_threads(
    function: Callable[[Input], Output], inputs: Sequence[Input]
) -> list[Future[Output]]:
    """Call a function on each input, in as many threads as torch uses; wait for all of them.

    An error of a call is raised where its result is asked for.
    """
    threads = torch.get_num_threads()
    # Each thread computes alone: threads of threads would wait for one another.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(function, one) for one in inputs]
    torch.set_num_threads(threads)  # what threads that begin later go by
    return futures
