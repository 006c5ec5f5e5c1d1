"""One attention layer: time, share of the device's GEMM rate and memory, MoA beside dense attention.

    python benchmarks/attention.py

Every MoA size is measured against a dense attention (torch's SDPA) with the same multiply-accumulates.
The sweep over E keeps K and D: the arithmetic stays, so the time should. On a GPU a step is also captured as
a CUDA graph and replayed: then the device's time alone counts, not the host's that launches the kernels. The
profile of a step of 8K32E128D says which kernels take it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from _bench import (
    arguments,
    gemm,
    kept_bytes,
    peak_bytes,
    profile,
    replay_times,
    report,
    take_turns,
)
from fairseq.modules import MultiheadAttention
from matplotlib.figure import Figure
from torch import Tensor, nn

from moa_fairseq.layers.experts import compile_ahead
from moa_fairseq.layers.moa import MixtureOfAttention
from moa_fairseq.plugin.fairseq_call import FairseqCall, with_fairseq_call

C = 512
SIZES = {
    "8K8E128D": (8, 8, 128),
    "8K32E128D": (8, 32, 128),
    "8K32E256D": (8, 32, 256),
    "16K32E256D": (16, 32, 256),
}
PROFILED = "8K32E128D"
EXPERTS = (8, 16, 32, 64)
SHAPES = {"cpu": ((32, 64), (128, 16)), "cuda": ((32, 256), (512, 16))}
SWEEP_SHAPE = (128, 64)  # 8,192 tokens
SMALL_SHAPE = (8, 4)


class DenseAttention(nn.Module):
    """Plain multi-head self-attention of any inner width: the baseline of equal arithmetic."""

    def __init__(self, inner: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(C, 3 * inner, bias=False)
        self.out = nn.Linear(inner, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, B, C] → [T, B, C]"""
        tgt_len, batch, _ = x.shape
        q, k, v = self.qkv(x).view(tgt_len, batch, 3, self.heads, -1).permute(2, 1, 3, 0, 4)
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.out(heads.permute(2, 0, 1, 3).reshape(tgt_len, batch, -1))


def mixture_macs(tokens: int, keys: int, per_token: int, experts: int, dim: int) -> int:
    """Projections, router and both attention products of one forward pass."""
    return tokens * (2 * (per_token + 1) * dim * C + experts * C + 2 * keys * per_token * dim)


def dense_twin(tokens: int, keys: int, macs: int) -> "tuple[DenseAttention, int]":
    """The dense attention with (nearly) as many MACs, heads of 64, and its exact MACs."""
    heads = max(1, round(macs / tokens / (4 * C + 2 * keys) / 64))
    return DenseAttention(64 * heads, heads), tokens * 64 * heads * (4 * C + 2 * keys)


def candidate(module: nn.Module, shape: "tuple[int, int]", args: Any) -> dict[str, Any]:
    """forward and step (forward + backward) of a module on random tokens."""
    module = module.to(args.device, args.torch_dtype)
    x = torch.randn(*shape, C, device=args.device, dtype=args.torch_dtype, requires_grad=True)
    upstream = torch.randn_like(x)

    def forward() -> Tensor:
        if isinstance(module, DenseAttention):
            return module(x)
        return module(x, x, x, need_weights=False)[0]

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        forward().backward(upstream)

    return {"forward": forward, "step": step, "module": module}


def _moa(experts: int, per_token: int, dim: int) -> FairseqCall:
    sizes = {"num_experts": experts, "experts_per_token": per_token, "expert_dim": dim}
    return with_fairseq_call(MixtureOfAttention)(C, **sizes, self_attention=True)


def compile_size(args: Any, shape: "tuple[int, int]", size: "tuple[int, int, int]") -> None:
    """The kernels of one mixture's step, for one of many processes."""
    from moa_fairseq.layers.experts.triton import table

    per_token, experts, dim = size
    module = _moa(experts, per_token, dim)
    with table.compiling():
        candidate(module, shape, args)["step"]()


def measure(args: Any, shape: "tuple[int, int]") -> dict[str, Any]:
    """All sizes at T × B tokens, in one run with the GEMM."""
    tokens = shape[0] * shape[1]
    keys = shape[0]
    product, product_macs = gemm(args.device, args.torch_dtype)
    found = {}
    macs = {}
    found["fairseq dense (8 heads of 64)"] = MultiheadAttention(C, 8, self_attention=True)
    macs["fairseq dense (8 heads of 64)"] = tokens * C * (4 * C + 2 * keys)
    for name, (per_token, experts, dim) in SIZES.items():
        found[name] = _moa(experts, per_token, dim)
        macs[name] = mixture_macs(tokens, keys, per_token, experts, dim)
        found[f"dense of {name}"], macs[f"dense of {name}"] = dense_twin(tokens, keys, macs[name])
    found = {name: candidate(module, shape, args) for name, module in found.items()}
    calls = {name: entry["step"] for name, entry in found.items()}
    times = take_turns({"gemm": product, **calls}, args.rounds, args.device)
    forwards = take_turns(
        {name: entry["forward"] for name, entry in found.items()}, args.rounds, args.device
    )
    rate = product_macs / times.pop("gemm")
    replays = replay_times(calls, args.rounds, args.device)
    rows = {}
    for name, entry in found.items():
        rows[name] = {
            "macs": macs[name],
            "forward_seconds": forwards[name],
            "step_seconds": times[name],
            "replay_seconds": replays.get(name),
            "gemm_share": 3 * macs[name] / replays.get(name, times[name]) / rate,
            "kept_bytes": kept_bytes(entry["forward"], entry["module"]),
            "peak_bytes": peak_bytes(entry["step"], args.device),
        }
    for name in SIZES:
        ours = rows[name]
        dense = rows[f"dense of {name}"]
        per_mac = dense["macs"] / ours["macs"]
        ours["time_over_dense"] = ours["step_seconds"] / dense["step_seconds"] * per_mac
        if ours["replay_seconds"] and dense["replay_seconds"]:
            ours["replay_over_dense"] = ours["replay_seconds"] / dense["replay_seconds"] * per_mac
        ours["kept_over_dense"] = ours["kept_bytes"] / dense["kept_bytes"] * per_mac
        ours["peak_over_dense"] = ours["peak_bytes"] / dense["peak_bytes"] * per_mac
    found_profile = profile(calls[PROFILED], args.device)
    sizes = {"T": shape[0], "B": shape[1], "gemm_macs_per_second": rate}
    return {**sizes, "rows": rows, "profile": {PROFILED: found_profile}}


def sweep_experts(args: Any, per_token: int, dim: int) -> "tuple[str, dict[str, float]]":
    """(what was timed, seconds of a step against E), at fixed K and D and 8,192 tokens."""
    shape = SMALL_SHAPE if args.miniature else SWEEP_SHAPE
    calls = {
        str(experts): candidate(_moa(experts, per_token, dim), shape, args)["step"]
        for experts in EXPERTS
    }
    label = f"K = {per_token}, D = {dim}"
    replays = replay_times(calls, args.rounds, args.device)
    if len(replays) == len(calls):
        return label, replays
    return f"{label}, eager" if args.device == "cuda" else label, take_turns(
        calls, args.rounds, args.device
    )


def draw(batches: "list[dict[str, Any]]", sweeps: dict[str, dict[str, float]], args: Any) -> Figure:
    figure = Figure(figsize=(6.5, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    width = 0.8 / len(batches)
    for i, batch in enumerate(batches):
        names = [name for name in batch["rows"] if not name.startswith("dense of")]
        places = [place + i * width for place in range(len(names))]
        shares = [batch["rows"][name]["gemm_share"] for name in names]
        upper.bar(places, shares, width, label=f"{batch['T']} × {batch['B']} tokens")
    upper.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(names))],
        [n.replace(" (", "\n(") for n in names],
        fontsize=8,
    )
    upper.axhline(1.0, color="#666666", linewidth=0.8)
    upper.set(ylabel="share of the GEMM rate", title="forward + backward", ylim=(0, 1.3))
    upper.legend(frameon=False, loc="upper right", ncols=2)
    for label, times in sweeps.items():
        first = next(iter(times.values()))
        lower.plot(
            list(times), [value / first for value in times.values()], marker="o", label=label
        )
    lower.axhspan(0.9, 1.1, color="#eeeeee")
    lower.set(
        xlabel="experts E", ylabel="time ÷ time at E = 8", title="8,192 tokens, fixed K and D"
    )
    lower.set_ylim(bottom=0)
    lower.legend(frameon=False, loc="lower right")
    for panel in (upper, lower):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"How fast is one attention layer? (width {C}, {args.device}, {args.dtype})", fontsize=11
    )
    return figure


def main() -> None:
    args = arguments(__doc__)
    shapes = (SMALL_SHAPE,) if args.miniature else SHAPES[args.device]
    batches = []
    if args.auto["backend"] == "triton":
        sweep = [(args, SWEEP_SHAPE, (k, experts, 128)) for k in (4, 8) for experts in EXPERTS]
        sizes = [(args, shape, size) for shape in shapes for size in SIZES.values()]
        compile_ahead.run(compile_size, [*sizes, *sweep])
    for shape in shapes:
        batches.append(measure(args, shape))
        print(
            f"{shape[0]} × {shape[1]} tokens: GEMM share; time, kept and peak memory ÷ dense of equal MACs"
        )
        for name, row in batches[-1]["rows"].items():
            time = "replay_over_dense" if row["replay_seconds"] else "time_over_dense"
            ratios = [row.get(key) for key in (time, "kept_over_dense", "peak_over_dense")]
            text = "".join("      -" if value is None else f"{value:7.2f}" for value in ratios)
            seconds = row["replay_seconds"] or row["step_seconds"]
            print(f"  {name:32s} {1000 * seconds:8.2f} ms {row['gemm_share']:6.2f} {text}")
        for row in batches[-1]["profile"][PROFILED][:10]:
            print(
                f"  {PROFILED}: {row['microseconds']:8.0f} µs  {row['count']:3d} × {row['name'][:90]}"
            )
    sweeps = dict(sweep_experts(args, k, d) for k, d in ((4, 128), (8, 128)))
    for label, times in sweeps.items():
        first = next(iter(times.values()))
        print(f"  {label}: " + ", ".join(f"E={e} {t / first:.2f}" for e, t in times.items()))
    report(
        "attention",
        args,
        {"width": C, "batches": batches, "experts_sweep": sweeps},
        draw(batches, sweeps, args),
    )


if __name__ == "__main__":
    main()
