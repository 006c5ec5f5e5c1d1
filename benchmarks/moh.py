"""One MoH layer: where leaving out heads that were not chosen beats computing and masking them.

    python benchmarks/moh.py                    the whole grid
    python benchmarks/moh.py --lengths 128 1024 --rounds 3

Shares of heads at work 90, 75 and 50 % (7, 6 and 4 of 8 heads, 2 of them shared), sequences of 128 to 4096
tokens, about 4096 tokens in a batch, with and without a causal mask; inference, and training (forward and
backward). Each with --moh-skip always, never and auto, beside fairseq's dense attention. What counts is how
far the automatic choice is from the better of the two.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from _bench import arguments, report, take_turns
from fairseq.modules import MultiheadAttention
from matplotlib.figure import Figure
from torch import Tensor, nn

from moa_fairseq.layers.moh import SKIPPING, MixtureOfHeads

C = 512
HEADS = 8
SHARED = 2
SHARES = {"90 %": 5, "75 %": 4, "50 %": 2}  # routed heads that a token chooses
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
TOKENS = {"cpu": 4096, "cuda": 16384}
DENSE = "dense"


def calls(module: nn.Module, length: int, causal: bool, args: Any) -> dict[str, Callable[[], Any]]:
    """ "inference" and "training" of a module on random tokens."""
    batch = 4 if args.miniature else max(1, TOKENS[args.device] // length)
    module = module.to(args.device, args.torch_dtype)
    x = torch.randn(
        length, batch, C, device=args.device, dtype=args.torch_dtype, requires_grad=True
    )
    upstream = torch.randn_like(x)
    mask = None
    if causal:
        blocked = torch.full(
            (length, length), -math.inf, device=args.device, dtype=args.torch_dtype
        )
        mask = torch.triu(blocked, 1)

    def forward() -> Tensor:
        if isinstance(module, MixtureOfHeads):
            return module(x.transpose(0, 1), causal=causal).transpose(0, 1)
        return module(x, x, x, attn_mask=mask, need_weights=False)[0]

    def inference() -> None:
        with torch.no_grad():
            forward()

    def training() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        forward().backward(upstream)

    return {"inference": inference, "training": training}


def measure(length: int, causal: bool, args: Any) -> list[dict[str, Any]]:
    """A row for each share of heads and each kind of run."""
    found = {DENSE: calls(MultiheadAttention(C, HEADS, self_attention=True), length, causal, args)}
    for share, routed in SHARES.items():
        for skip in SKIPPING:
            module = MixtureOfHeads(
                C,
                HEADS,
                moh_shared_heads=SHARED,
                experts_per_token=routed,
                moh_skip=skip,
                causal=causal,
                self_attention=True,
            )
            found[f"{share} {skip}"] = calls(module, length, causal, args)
    rows = []
    for kind in ("inference", "training"):
        times = take_turns(
            {name: each[kind] for name, each in found.items()}, args.rounds, args.device
        )
        for share in SHARES:
            own = {skip: times[f"{share} {skip}"] for skip in SKIPPING}
            best = min(own["always"], own["never"])
            seconds = {**own, DENSE: times[DENSE]}
            rows.append(
                {
                    "length": length,
                    "causal": causal,
                    "run": kind,
                    "share": share,
                    "seconds": seconds,
                }
            )
            rows[-1]["auto_over_best"] = own["auto"] / best
            rows[-1]["skipping_over_masking"] = own["always"] / own["never"]
    return rows


def draw(rows: list[dict[str, Any]], args: Any) -> Figure:
    """Time of skipping over time of masking against the length; below 1 skipping is faster."""
    figure = Figure(figsize=(6.5, 5.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for line, causal in zip(panels, (False, True)):
        for panel, kind in zip(line, ("inference", "training")):
            for share in SHARES:
                own = [
                    r for r in rows if (r["causal"], r["run"], r["share"]) == (causal, kind, share)
                ]
                ratios = [r["skipping_over_masking"] for r in own]
                panel.plot(
                    [r["length"] for r in own], ratios, marker="o", label=f"{share} of the heads"
                )
            panel.axhline(1.0, color="#666666", linewidth=0.8)
            panel.set(title=f"{kind}{', causal' if causal else ''}", xscale="log")
            panel.set_xticks(
                sorted({r["length"] for r in rows}), sorted({r["length"] for r in rows})
            )
            panel.set_xticks([], minor=True)
            panel.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("time ÷ masking")
    for panel in panels[-1]:
        panel.set_xlabel("tokens per sentence")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    layer = f"one layer, width {C}, {HEADS} heads, {args.device}, {args.dtype}"
    figure.suptitle(f"When is skipping heads faster than masking them?\n({layer})", fontsize=11)
    return figure


def main() -> None:
    args = arguments(__doc__, more={"--lengths": {"type": int, "nargs": "+", "default": LENGTHS}})
    rows = []
    for length in (16,) if args.miniature else args.lengths:
        for causal in (False, True):
            for row in measure(length, causal, args):
                rows.append(row)
                times = "  ".join(
                    f"{name} {1000 * t:8.1f} ms" for name, t in row["seconds"].items()
                )
                what = f"{length:5d} {'causal' if causal else '':6s} {row['run']:9s} {row['share']}"
                print(f"{what}: {times}  auto ÷ best {row['auto_over_best']:.2f}", flush=True)
    worst = max(row["auto_over_best"] for row in rows)
    print(f"the automatic choice takes at most {worst:.2f} times the better one's time")
    sizes = {"width": C, "heads": HEADS, "shared": SHARED, "tokens": TOKENS[args.device]}
    report("moh", args, {**sizes, "rows": rows, "worst_auto_over_best": worst}, draw(rows, args))


if __name__ == "__main__":
    main()
