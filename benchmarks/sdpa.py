"""torch's attention alone: which of its back ends takes which mask and width, and how fast each is.

    python benchmarks/sdpa.py

Forward and backward of 8 heads over 8,192 tokens (2,048 on the CPU), as `layers.sdpa` calls it: without a
mask, causal, with padded keys, and both. "refused" is a back end that does not serve the call. MoA's queries
share one head of keys; "folded" is how they are computed for short sentences, as more queries of that head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _bench import arguments, report, take_turns
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS = 8
WIDTHS = (64, 128, 256)
LENGTH = {"cpu": (128, 16), "cuda": (128, 64)}  # T, B
BACKENDS = {
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH},
    "cuda": {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    },
}
MASKS = ("none", "causal", "padding", "causal and padding", "none, folded", "padding, folded")


def shape_of(args: Any) -> "tuple[int, int]":
    """T and B."""
    return (8, 4) if args.miniature else LENGTH[args.device]


def call(mask: str, width: int, args: Any) -> Callable[[], None]:
    """Forward and backward pass under whatever back ends are allowed at the time."""
    length, batch = shape_of(args)
    folded = mask.endswith("folded")
    shape = (batch, 1, length * HEADS, width) if folded else (batch, HEADS, length, width)
    like = {"device": args.device, "dtype": args.torch_dtype}
    q = torch.randn(shape, **like, requires_grad=True)
    k, v = (torch.randn(batch, 1, length, width, **like, requires_grad=True) for _ in range(2))
    upstream = torch.randn(shape, **like)
    additive: Tensor | None = None
    if "padding" in mask:
        lengths = torch.arange(length, length // 2, -1, device=args.device)[:batch].repeat(batch)[
            :batch
        ]
        padded = torch.arange(length, device=args.device) >= lengths.unsqueeze(1)
        additive = torch.zeros(batch, 1, 1, length, **like).masked_fill(
            padded[:, None, None], -torch.inf
        )
    if mask == "causal and padding":
        additive = additive + torch.full((length, length), -torch.inf, **like).triu(1)
    is_causal = mask == "causal"

    def step() -> None:
        q.grad = k.grad = v.grad = None
        keys, values = (k, v) if folded else (t.expand(-1, HEADS, -1, -1) for t in (k, v))
        F.scaled_dot_product_attention(
            q, keys, values, attn_mask=additive, is_causal=is_causal
        ).backward(upstream)

    return step


def under(backend: SDPBackend, step: Callable[[], None]) -> Callable[[], None]:
    """step with one back end; raises RuntimeError if it does not serve the call."""

    def forced() -> None:
        with sdpa_kernel(backend):
            step()

    return forced


def measure(args: Any) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for width in WIDTHS:
        for mask in MASKS:
            step = call(mask, width, args)
            calls = {"default": step}
            row = rows[f"D = {width}, {mask}"] = dict.fromkeys(BACKENDS[args.device])
            for name, backend in BACKENDS[args.device].items():
                forced = under(backend, step)
                try:
                    forced()
                except torch.OutOfMemoryError:
                    raise
                except (
                    RuntimeError
                ):  # a backend does not take this mask: torch has no kind of its own for it
                    continue
                calls[name] = forced
            row.update(take_turns(calls, args.rounds, args.device))
            times = (
                "refused" if row[name] is None else f"{row[name] * 1e3:.2f} ms" for name in row
            )
            print(f"D = {width:3d}  {mask:20s}", *(f"{n} {t:10s}" for n, t in zip(row, times)))
    return rows


def draw(rows: dict[str, Any], args: Any) -> Figure:
    figure = Figure(figsize=(6.5, 0.32 * len(rows) + 1.2), layout="constrained")
    panel = figure.subplots()
    names = ["default", *BACKENDS[args.device]]
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        values = [(row[name] or 0) * 1e3 for row in rows.values()]
        panel.barh([place + i * height for place in range(len(rows))], values, height, label=name)
    panel.set_yticks(
        [place + 0.4 - height / 2 for place in range(len(rows))], list(rows), fontsize=8
    )
    panel.invert_yaxis()
    panel.set_xlabel(f"ms, forward and backward ({args.device}, {args.dtype})")
    figure.suptitle("Which of torch's attention kernels is fastest?", fontsize=11)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    args = arguments(__doc__)
    length, batch = shape_of(args)
    rows = measure(args)
    report("sdpa", args, {"T": length, "B": batch, "heads": HEADS, "rows": rows}, draw(rows, args))


if __name__ == "__main__":
    main()
