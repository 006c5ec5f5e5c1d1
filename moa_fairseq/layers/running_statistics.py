"""Modules that keep statistics over updates: what they see during an update takes effect after it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


class RunningStatistics(nn.Module):
    """Adds up what it sees in training (`pending`), and takes it in after the update (`update`).

    So a batch affects only later updates, all accumulation steps and workers count, and a skipped update
    leaves no trace. Its buffers stay in float32 whatever the model is cast to: counts of tokens and small
    steps are lost in half precision.
    """

    pending: Tensor  # a buffer [n] of sums, not part of checkpoints
    has_pending = False

    def update(self, sums: Tensor) -> None:
        """Take in what was observed during an update.

        Args:
            sums: [n], like `pending` but over all workers.
        """

    @torch.no_grad()
    def observe(self, sums: Tensor) -> None:
        """Add to what is pending.

        Args:
            sums: [n], of one forward pass.
        """
        if self.pending.is_meta:  # the module was made there, and its weights assigned
            self.pending = torch.zeros_like(sums)
        self.pending += sums
        self.has_pending = True

    def _apply(
        self, fn: Callable[[Tensor], Tensor], *args: object, **kwargs: object
    ) -> "RunningStatistics":
        before = dict(self._buffers)
        super()._apply(fn, *args, **kwargs)
        for name, buffer in self._buffers.items():
            wide = before[name]
            if (
                buffer is not None
                and wide is not None
                and buffer.dtype in (torch.float16, torch.bfloat16)
            ):
                self._buffers[name] = wide.to(buffer.device)
        pending = self._buffers.get("pending")
        was = before.get("pending")
        if pending is not None and was is not None and was.is_meta and not pending.is_meta:
            pending.zero_()  # no checkpoint has it, so nothing else would fill it
        return self

    def forget(self) -> None:
        """Drop what has been observed since the last `update`."""
        self.pending.zero_()
        self.has_pending = False


def running_statistics_of(model: nn.Module) -> list[RunningStatistics]:
    """Every module of a model that has something to observe, in order."""
    return [
        m
        for m in model.modules()
        if isinstance(m, RunningStatistics) and getattr(m, "pending", None) is not None
    ]


def update_running_statistics(
    running_statistics: Sequence[RunningStatistics],
    all_reduce: Callable[[Tensor], object] | None = None,
) -> None:
    """Let each take in what it has seen since the last call.

    Args:
        running_statistics: those of a model, the same ones in the same order on every worker.
        all_reduce: sums a tensor over all workers in place; every worker must call at the same time. None:
            there is one worker.
    """
    if not running_statistics:
        return
    flat = torch.cat([statistics.pending for statistics in running_statistics])
    if all_reduce is not None:
        all_reduce(flat)
    sizes = [statistics.pending.numel() for statistics in running_statistics]
    for statistics, sums in zip(running_statistics, flat.split(sizes)):
        statistics.update(sums)
        statistics.forget()


@contextlib.contextmanager
def forgetting(running_statistics: Sequence[RunningStatistics]) -> Iterator[None]:
    """Drop what is observed inside the block. `has_pending` stays set: all workers still call all_reduce."""
    before = [statistics.pending.clone() for statistics in running_statistics]
    try:
        yield
    finally:
        for statistics, pending in zip(running_statistics, before):
            statistics.pending.copy_(pending)
