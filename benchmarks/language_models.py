"""Training of causal language models: time and memory of an update, SwitchHead and its relatives.

    python benchmarks/language_models.py

The Transformer-XL whose attention has as many parameters is 1.0 in each group. An update is forward and
backward of one chunk that looks at a carried chunk before it, with the criterion of the recipe
(configs/*_lm_*), and Adam. SwitchHead's paper prints 0.72 of the dense model's time and 0.65 of its memory
for the 47M pair on a GPU (Table 7).
"""

from collections.abc import Callable
from typing import Any

import torch
from _bench import arguments, peak_bytes, report, take_turns
from _models import dictionary
from fairseq import criterions, options
from matplotlib.figure import Figure

from moa_fairseq.plugin.tasks.language_modeling_truncated_bptt import TruncatedBPTTTask

_TWO_HEADS = [
    "--num-experts",
    "1",
    "--experts-per-token",
    "1",
    "--switchhead-heads",
    "2",
    "--expert-dim",
]
_ROUTED = ["--criterion", "cross_entropy_with_routing"]
_NO_BALANCE = [*_ROUTED, "--balance-loss", "none", "--z-loss-coef", "0"]
_MOA = [*_ROUTED, "--load-balance-coef", "0.01", "--z-loss-coef", "0.001"]
_ENTROPY = [
    *_ROUTED,
    "--balance-loss",
    "entropy",
    "--load-balance-coef",
    "0.0001",
    "--z-loss-coef",
    "0",
]
# group → (texts and tokens of a chunk on a CPU, on a GPU; pieces of the vocabulary; models: arch and flags)
Models = dict[str, tuple[str, list[str]]]
GROUPS: dict[str, tuple[tuple[int, int], tuple[int, int], int, Models]] = {
    "tiny": (
        (16, 128),
        (16, 128),
        4000,
        {
            "dense, 10 heads": ("transformer_xl_lm_tiny", []),
            "dense, 2 heads": ("transformer_xl_lm_tiny", [*_TWO_HEADS, "80"]),
            "MoA 4K10E34D": ("moa_lm_tiny", _MOA),
            "SwitchHead, 2 heads, 2 of 5": ("switchhead_lm_tiny", _NO_BALANCE),
            "SwitchHead, 2 heads, E = 1": ("switchhead_lm_tiny", [*_TWO_HEADS, "80", *_NO_BALANCE]),
            "SwitchAll": ("switchall_lm_tiny", _ENTROPY),
        },
    ),
    "47M": (
        (4, 256),
        (64, 256),
        8000,
        {
            "dense, 10 heads": ("transformer_xl_lm_47m", []),
            "dense, 2 heads": ("transformer_xl_lm_47m", [*_TWO_HEADS, "205"]),
            "MoA 4K10E88D": ("moa_lm_47m", _MOA),
            "SwitchHead, 2 heads, 2 of 5": ("switchhead_lm_47m", _NO_BALANCE),
            "SwitchAll": ("switchall_lm_47m", _ENTROPY),
        },
    ),
}


def update(
    arch: str, flags: list[str], shape: tuple[int, int], pieces: int, args: Any
) -> "tuple[Callable[[], None], int]":
    """One optimiser update on the next chunk, and the model's parameters."""
    batch, length = shape
    command = ["data", "--task", "language_modeling_truncated_bptt", "--arch", arch]
    command += ["--tokens-per-sample", str(length), "--carried-chunks", "1", *flags]
    if args.dtype == "float16" or args.dtype == "bfloat16":
        command.append("--fp16" if args.dtype == "float16" else "--bf16")
    parsed = options.parse_args_and_arch(options.get_training_parser(), command)
    words = dictionary(pieces)
    task = TruncatedBPTTTask(parsed, words, words, targets=["future"])
    model = task.build_model(parsed).to(args.device, args.torch_dtype).train()
    criterion = criterions.build_criterion(parsed, task)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    text = torch.randint(4, pieces, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    text = text.to(args.device)
    lengths = torch.full((batch,), length, device=args.device)
    sample = {
        "id": torch.arange(batch, device=args.device),
        "net_input": {"src_tokens": text[:, :-1], "src_lengths": lengths, "chunk": 0},
        "target": text[:, 1:].contiguous(),
        "ntokens": batch * length,
        "nsentences": batch,
    }

    def step() -> None:
        sample["net_input"]["chunk"] += 1  # each follows the one before, and is given its context
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, enabled=args.dtype == "amp"):
            loss = criterion(model, sample)[0]
        loss.backward()
        optimizer.step()

    return step, sum(parameter.numel() for parameter in model.parameters())


def draw(groups: dict[str, Any], args: Any) -> Figure:
    figure = Figure(figsize=(8, 1.2 + 0.32 * sum(len(group["rows"]) for group in groups.values())))
    figure.set_layout_engine("constrained")
    heights = [len(group["rows"]) for group in groups.values()]
    panels = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights, sharex="col")
    for (name, group), (left, right) in zip(groups.items(), panels):
        for panel, key in ((left, "time_over_dense"), (right, "memory_over_dense")):
            values = [row[key] for row in group["rows"].values()]
            panel.barh(list(group["rows"]), values, color="#0072B2" if panel is left else "#E69F00")
            for place, value in enumerate(values):
                panel.text(value, place, f" {value:.2f}", va="center", fontsize=8)
            panel.axvline(1, color="#999999", linewidth=0.8, zorder=0)
            panel.margins(x=0.15)
            panel.invert_yaxis()
            panel.spines[["top", "right"]].set_visible(False)
        right.set_yticklabels([])
        left.set_title(f"{name}: time of an update ÷ dense", fontsize=9)
        right.set_title("peak memory ÷ dense", fontsize=9)
    figure.suptitle(f"Training of causal language models, {args.device}, {args.dtype}", fontsize=10)
    return figure


def main() -> None:
    args = arguments(__doc__, amp=True)
    groups = {}
    for name, (cpu, cuda, pieces, models) in GROUPS.items():
        if args.miniature and name != "tiny":
            continue
        shape = (2, 16) if args.miniature else (cuda if args.device == "cuda" else cpu)
        steps = {}
        parameters = {}
        for label, (arch, flags) in models.items():
            steps[label], parameters[label] = update(arch, flags, shape, pieces, args)
        times = take_turns(steps, args.rounds, args.device)
        peaks = {label: peak_bytes(step, args.device) for label, step in steps.items()}
        dense = next(iter(models))
        rows = {
            label: {
                "seconds": seconds,
                "tokens_per_second": shape[0] * shape[1] / seconds,
                "parameters": parameters[label],
                "peak_bytes": peaks[label],
                "time_over_dense": seconds / times[dense],
                "memory_over_dense": peaks[label] / peaks[dense],
            }
            for label, seconds in times.items()
        }
        for label, row in rows.items():
            print(
                f"{name:5s} {label:28s} {row['parameters'] / 1e6:5.1f}M {row['tokens_per_second']:8.0f} "
                f"tokens/s {row['peak_bytes'] >> 20:5d} MiB  time {row['time_over_dense']:.2f} and memory "
                f"{row['memory_over_dense']:.2f} of the dense model's"
            )
        groups[name] = {"texts": shape[0], "chunk": shape[1], "rows": rows}
    report("language_models", args, {"groups": groups}, draw(groups, args))


if __name__ == "__main__":
    main()
