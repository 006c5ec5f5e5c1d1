"""Which epochs have G steps, and whether a run is long enough to reach one."""

import math
from typing import Any, Optional


def too_short_for_a_g_epoch(trainer: Any, every: int) -> Optional[str]:
    """A warning for a run whose --max-epoch or --max-update ends it before epoch `every`; else None.

    trainer: fairseq's, with its training data loaded. Early stopping (--patience) is not taken into account.
    """
    limits = trainer.cfg.optimization
    ends = []
    if limits.max_epoch:
        ends.append((limits.max_epoch, f"--max-epoch {limits.max_epoch}"))
    task = trainer.task
    iterator = task.dataset_to_epoch_iter.get(task.dataset(trainer.cfg.dataset.train_subset))
    if limits.max_update and iterator is not None:
        updates = math.ceil(len(iterator) / limits.update_freq[-1])
        ends.append((math.ceil(limits.max_update / updates), f"--max-update {limits.max_update}"))
    last, flag = min(ends, default=(every, ""))
    if last >= every:
        return None
    return (
        f"this run takes no G step: {flag} ends in epoch {last}, and --bcd-g-every {every} takes the first "
        f"ones in epoch {every}. Its gates stay as they were initialised, and experts are drawn almost "
        f"uniformly: train longer, or lower --bcd-g-every."
    )
