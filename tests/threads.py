"""What several threads compute at the same time is what one of them computes alone."""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

THREADS = 8


def assert_same_in_threads(run, rounds=2):
    """run(number) → tensors, alone and with seven others, which take turns far more often than by default."""
    alone = [run(number) for number in range(THREADS)]
    numbers = list(range(THREADS)) * rounds
    interval = sys.getswitchinterval()
    threads = torch.get_num_threads()
    sys.setswitchinterval(5e-5)
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for number, found in zip(numbers, pool.map(run, numbers)):
                torch.testing.assert_close(found, alone[number], rtol=0, atol=1e-12)
    finally:
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads)
