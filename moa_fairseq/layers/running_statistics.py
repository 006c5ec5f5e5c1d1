"""Modules that keep statistics over updates: observations during an update take effect after it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


class RunningStatistics(nn.Module):
    """A module that sums observations in training (`pending`), and uses the sums after the update (`update`).

    So a batch affects only later updates, all accumulation steps and workers count, and a skipped update has
    no effect. Buffers stay in float32 even if the model is cast to half precision, which would lose counts of
    tokens and small steps.
    """

    pending: Tensor  # a buffer of sums, [n], which checkpoints leave out
    has_pending = False

    def update(self, sums: Tensor) -> None:
        """Use the observations of an update.

        Args:
            sums: the sum of `pending` over all workers, [n].
        """

    @torch.no_grad()
    def observe(self, sums: Tensor) -> None:
        """Add observations to `pending`.

        Args:
            sums: the sums of one forward pass, [n].
        """
        # The module was made on the meta device, and only its weights were assigned
        if self.pending.is_meta:
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
            pending.zero_()  # checkpoints leave it out, so nothing else would initialise it
        return self

    def forget(self) -> None:
        """Drop the observations since the last `update`."""
        self.pending.zero_()
        self.has_pending = False


def running_statistics_of(model: nn.Module) -> list[RunningStatistics]:
    """All modules of a model that observe something, in order."""
    return [
        m
        for m in model.modules()
        if isinstance(m, RunningStatistics) and getattr(m, "pending", None) is not None
    ]


def update_running_statistics(
    running_statistics: Sequence[RunningStatistics],
    all_reduce: Callable[[Tensor], object] | None = None,
) -> None:
    """Update each module with its observations since the last call.

    Args:
        running_statistics: the modules of a model, the same in the same order on every worker.
        all_reduce: sums a tensor over all workers in place; every worker must call this function at the same
            time. None: there is one worker.
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
    """A block that drops observations. `has_pending` stays set, so all workers still call all_reduce."""
    before = [statistics.pending.clone() for statistics in running_statistics]
    try:
        yield
    finally:
        for statistics, pending in zip(running_statistics, before):
            statistics.pending.copy_(pending)
