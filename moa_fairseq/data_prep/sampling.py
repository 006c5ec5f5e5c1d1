"""A part of a training text, chosen at random: how well does a method do with less data (MAE §5.2)."""

from __future__ import annotations

import math
import random
from typing import Callable, Dict

from moa_fairseq.data_prep.parallel_text import PiecePair, read_lines


def sample_pairs(
    source: PiecePair, destination: PiecePair, fraction: float, seed: int, say: Callable[[str], None]
) -> Dict[str, int]:
    """Write fraction of the pairs of two files, one at least, in their order; returns how many.

    The sample of a smaller fraction is part of a larger one's with the same seed.
    """
    total = sum(1 for _ in read_lines(source[0].path))
    order = list(range(total))
    random.Random(seed).shuffle(order)
    kept = set(order[: max(1, math.ceil(total * fraction))])
    for old, new in zip(source, destination):
        with open(new.path, "w", encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(read_lines(old.path)):
                if number in kept:
                    stream.write(line + "\n")
    say(f"sample: {len(kept):,} of {total:,} training pairs")
    return {"lines": len(kept), "of": total}
