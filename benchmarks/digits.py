"""MoH in a small vision Transformer on scikit-learn's digits: accuracy with 100, 75 and 50 % of the heads.

    pip install scikit-learn
    python benchmarks/digits.py

What MoH-ViT does on ImageNet (MoH Table 1; not run here), on 1,797 pictures of 8 × 8 pixels that a Python
package ships: three stages of 4, 8 and 16 heads with 64, 16 and 4 tokens, shared and routed heads of their
own in each stage. 500 pictures are for testing, the same in every run; several seeds, the mean and its
standard error.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _bench import arguments, report
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from moa_fairseq.layers.losses import head_balance_loss
from moa_fairseq.layers.moh import MixtureOfHeads
from moa_fairseq.layers.routing import Routing

# model → (shared, routed) heads of each token in the three stages; None: dense attention
# All of the first stage's heads, half of the last's
STAGES: dict[str, tuple[tuple[int, int], ...] | None] = {
    "100 % (dense)": None,
    "75 %": ((2, 1), (3, 3), (4, 8)),
    "50 %": ((1, 1), (2, 2), (4, 4)),
    "as MoH-ViT-B 50 %": (
        (2, 2),
        (2, 4),
        (2, 6),
    ),
}
HEADS = (4, 8, 16)
HEAD_DIM = 8
LAYERS = 2
CLASSES = 10
SIDE = 8
# MoH's beta; pictures of an update
BALANCE = 0.01
BATCH = 128


class Block(nn.Module):
    """Pre-norm Transformer layer over x [B, T, C]; heads: (shared, routed), or None for dense attention."""

    def __init__(self, num_heads: int, heads: tuple[int, int] | None):
        super().__init__()
        width = num_heads * HEAD_DIM
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        if heads is None:
            self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        else:
            shared, routed = heads
            self.attention = MixtureOfHeads(
                width,
                num_heads,
                moh_shared_heads=shared,
                experts_per_token=routed,
                self_attention=True,
            )
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, routings: list[Routing]) -> Tensor:
        h = self.norms[0](x)
        if isinstance(self.attention, MixtureOfHeads):
            heads, found = self.attention(h, with_routing=True)
            routings.extend(found)
        else:
            heads, _ = self.attention(h, h, h, need_weights=False)
        x = x + heads
        return x + self.feed_forward(self.norms[1](x))


class VisionTransformer(nn.Module):
    """Pictures [B, 8, 8] → logits [B, 10]; a convolution before each stage; two of them halve the sides."""

    def __init__(self, stages: tuple[tuple[int, int], ...] | None):
        super().__init__()
        self.enter, self.layers, self.places = nn.ModuleList(), nn.ModuleList(), nn.ParameterList()
        width = 1
        for stage, num_heads in enumerate(HEADS):
            before = width
            width = num_heads * HEAD_DIM
            tokens = (SIDE >> stage) ** 2
            self.enter.append(nn.Conv2d(before, width, 3, stride=2 if stage else 1, padding=1))
            self.places.append(nn.Parameter(0.02 * torch.randn(tokens, width)))
            heads = None if stages is None else stages[stage]
            self.layers.append(nn.ModuleList(Block(num_heads, heads) for _ in range(LAYERS)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, pictures: Tensor) -> tuple[Tensor, list[Routing]]:
        x = pictures.unsqueeze(1)
        routings: list[Routing] = []
        for enter, place, layers in zip(self.enter, self.places, self.layers):
            x = enter(x)
            rows = x.flatten(2).transpose(1, 2) + place  # [B, C, side, side] → [B, T, C]
            for layer in layers:
                rows = layer(rows, routings)
            x = rows.transpose(1, 2).reshape(x.shape)
        return self.out(self.norm(rows.mean(1))), routings


def data(device: str) -> tuple[Tensor, ...]:
    """Pictures and classes for training, then for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    parts = train_test_split(
        digits.images / 16, digits.target, test_size=500, random_state=0, stratify=digits.target
    )
    pictures, tests, classes, answers = map(torch.as_tensor, parts)
    return (
        pictures.float().to(device),
        classes.to(device),
        tests.float().to(device),
        answers.to(device),
    )


def accuracy(
    name: str, seed: int, epochs: int, examples: tuple[Tensor, ...], tick: Callable[[], Any]
) -> float:
    """Train one model; the share of the test pictures that it names, in per cent."""
    pictures, classes, tests, answers = examples
    torch.manual_seed(seed)
    model = VisionTransformer(STAGES[name]).to(pictures.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    batches = -(-len(pictures) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, epochs * batches, pct_start=0.1)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(pictures), device=pictures.device).split(BATCH):
            moved = F.pad(pictures[batch], (1, 1, 1, 1))
            down, right = torch.randint(0, 3, (2,)).tolist()  # by up to one pixel
            logits, routings = model(moved[:, down : down + SIDE, right : right + SIDE])
            loss = F.cross_entropy(logits, classes[batch])
            loss = loss + BALANCE * sum(head_balance_loss(routing) for routing in routings)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        tick()
    model.eval()
    with torch.no_grad():
        return 100 * (model(tests)[0].argmax(1) == answers).float().mean().item()


def draw(rows: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(6, 3), layout="constrained")
    panel = figure.subplots()
    for place, row in enumerate(rows.values()):
        panel.plot(
            [place] * len(row["accuracies"]), row["accuracies"], "o", color="#BBBBBB", markersize=4
        )
        error = row["standard_error"]
        panel.errorbar(place, row["mean"], yerr=error, fmt="_", color="#0072B2", markersize=20)
    panel.set_xticks(range(len(rows)), rows)
    panel.margins(x=0.15)
    panel.set(
        ylabel="test accuracy, %", title="MoH on scikit-learn's digits, by heads of each token"
    )
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    args = arguments(
        __doc__,
        more={
            "--seeds": {"type": int, "default": 5, "help": "models of each kind"},
            "--epochs": {"type": int, "default": 30},
        },
    )
    args.dtype, args.stem = "float32", args.device  # the models train so, whatever was asked
    if args.miniature:
        args.seeds = 2
        args.epochs = 1
    examples = data(args.device)
    rows = {}
    with tqdm(total=len(STAGES) * args.seeds * args.epochs, unit="epoch") as progress:
        found: dict[str, list] = {name: [] for name in STAGES}
        for seed in range(1, args.seeds + 1):
            for name in STAGES:
                found[name].append(accuracy(name, seed, args.epochs, examples, progress.update))
    for name, values in found.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        rows[name] = {
            "accuracies": values,
            "mean": statistics.mean(values),
            "standard_error": error,
        }
        print(f"{name:20s} {rows[name]['mean']:.2f} % ± {error or 0:.2f} ({len(values)} seeds)")
    stages = {name: value for name, value in STAGES.items() if value is not None}
    sizes = {"epochs": args.epochs, "heads": HEADS, "shared_and_routed": stages}
    report("digits", args, {**sizes, "rows": rows}, draw(rows))


if __name__ == "__main__":
    main()
