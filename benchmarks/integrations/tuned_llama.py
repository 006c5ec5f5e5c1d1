"""MoH tuned from a dense Llama at 75 % of the heads, beside controls that are tuned as long.

    python benchmarks/integrations/tuned_llama.py --from DIR   train, tune, measure; again to go on

Needs transformers (bash scripts/setup.sh --integrations), scipy, and WikiText-2 as plain text in DIR:
wikitext-2.train.txt and wikitext-2.valid.txt, or the same with .gz.

The protocol, fixed before the first run that counts:

- For each of five seeds (101 to 105) a Llama is trained from random weights on the bytes of the text: SIZES,
  TRAINING. A pilot of seed 1 at this size, with the arms "dense" and "no attention" alone, on 64 rows: 2.183
  and 2.684 nats a byte, so that all attention is worth 0.50. It does not count.
- From the same weights each arm of ARMS is tuned for a tenth of the updates on the same rows in the same
  order. MoH has 4 shared heads and chooses 2 of the other 4 by the norms of queries, balance 0.01. "six
  fixed heads" always has the first 6; "random" has the 4 shared and 2 drawn anew for each token, in the
  evaluation, too; "no attention" has none. "dense" goes on with all 8.
- Measure: nats a byte on the first ROWS rows of the validation text, after tuning.
- Compared: dense − MoH, fixed − MoH, random − MoH, none − dense, paired by seed: mean, 95 % t interval and
  two-sided t test, without correction for their number. A difference counts where the interval excludes 0.
"""

import argparse
import gzip
import json
import math
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.experiments.scoring.significance import paired
from moa_fairseq.files import atomic_write
from moa_fairseq.files.utf8 import use_utf8
from moa_fairseq.integrations.heads import HeadMixture
from moa_fairseq.integrations.hf import to_mixture_of_heads
from moa_fairseq.layers.moh_routers import QueryNormRouter
from moa_fairseq.layers.routing import Routing

ROOT = Path(__file__).resolve().parents[2]
MADE_BY = provenance()  # before the training, for the code may change in the meantime
MADE_BY["versions"]["transformers"] = transformers.__version__
# bytes of a row; rows of an update, of an evaluation
LENGTH = 128
BATCH = 8
ROWS = 128
HEADS = 8
SHARED = 4
ACTIVE = 6
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
# AdamW (0.9, 0.95), weight decay 0.1, clipping at 1; warm-up, then a cosine to a tenth
TRAINING = {"updates": 200, "learning_rate": 3e-3, "warm_up": 10}
TUNING = {"updates": 20, "learning_rate": 4e-4, "warm_up": 2}
ARMS = ("dense", "MoH", "six fixed heads", "random", "no attention")
COMPARED = (
    ("dense", "MoH"),
    ("six fixed heads", "MoH"),
    ("random", "MoH"),
    ("no attention", "dense"),
)


class Control(QueryNormRouter):
    """Chooses as MoH does, but not by the queries."""

    def __init__(self, arm: str):
        super().__init__(HEADS, SHARED, ACTIVE - SHARED)
        self.arm = arm

    def forward(self, queries: Tensor, *inputs: Any) -> Routing:
        rows = queries.detach().reshape(-1, HEADS, queries.size(-1) // HEADS)
        if self.arm == "random":
            norms = torch.rand(rows.shape[:2], device=rows.device)
        else:
            norms = torch.arange(HEADS, 0, -1.0, device=rows.device).expand(rows.shape[:2])
        routing: Routing = super().forward(norms.unsqueeze(-1).expand_as(rows).flatten(1), *inputs)
        return replace(routing, gates=0 * routing.gates) if self.arm == "no attention" else routing


def text(folder: Path) -> tuple[Tensor, Tensor]:
    """The bytes of the training and of the validation text."""
    found = []
    for part in ("train", "valid"):
        plain = folder / f"wikitext-2.{part}.txt"
        packed = Path(f"{plain}.gz")
        if not plain.exists() and not packed.exists():
            raise UserError(
                f"--from {folder} has no {plain.name}, nor the same with .gz: name its folder."
            )
        data = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
        found.append(torch.frombuffer(bytearray(data), dtype=torch.uint8).long())
    return found[0], found[1]


def train(
    model: torch.nn.Module, rows: Tensor, order: Tensor, settings: dict[str, Any], progress: Any
) -> None:
    """Update the model on rows[order], BATCH of them each time."""
    updates = settings["updates"]
    warm_up = settings["warm_up"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], betas=(0.9, 0.95), weight_decay=0.1
    )

    def rate(step: int) -> float:
        done = (step - warm_up) / max(1, updates - warm_up)
        return (step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * done)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    for chosen in order.view(updates, BATCH):
        loss = model(rows[chosen], labels=rows[chosen]).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.update()
        progress.set_postfix(loss=f"{loss.item():.3f}")


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: Tensor) -> float:
    """Nats a byte; the same draws each time."""
    torch.manual_seed(0)
    model.eval()
    return sum(
        model(part, labels=part).loss.item() * len(part) for part in rows.split(BATCH)
    ) / len(rows)


def arm_of(name: str, dense: LlamaForCausalLM) -> torch.nn.Module:
    """The dense model as this arm, in place."""
    if name == "dense":
        return dense
    model = to_mixture_of_heads(dense, SHARED, ACTIVE, balance=0.01 if name == "MoH" else 0.0)
    for module in [*model.modules()]:
        if name != "MoH" and isinstance(module, HeadMixture):
            module.router = Control(name).train(module.training)
    return model


def record(path: Path, content: dict[str, Any]) -> None:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        cpu = next(
            (line.split(":")[1].strip() for line in stream if line.startswith("model name")), ""
        )
    facts = {
        "sizes": SIZES,
        "training": TRAINING,
        "tuning": TUNING,
        "heads": {"shared": SHARED, "active": ACTIVE},
        "rows": {"length": LENGTH, "batch": BATCH, "validation": ROWS},
        "hardware": f"{cpu or platform.machine()}, {torch.get_num_threads()} thread(s)",
        **MADE_BY,
        "command": " ".join(["python", "benchmarks/integrations/tuned_llama.py", *sys.argv[1:]]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        json.dump({**content, **facts}, stream, indent=1)
        stream.write("\n")


def run(seed: int, data: tuple[Tensor, Tensor], work: Path, output: Path) -> None:
    """What is missing of one seed: its dense model, and each arm."""
    rows, valid = (ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH) for ids in data)
    valid = valid[:ROWS]
    generator = torch.Generator().manual_seed(seed)
    count = BATCH * (TRAINING["updates"] + TUNING["updates"])
    order = torch.cat(
        [torch.randperm(len(rows), generator=generator) for _ in range(-(-count // len(rows)))]
    )
    first, second = order[:count].split([BATCH * TRAINING["updates"], BATCH * TUNING["updates"]])
    folder = work / f"dense-seed{seed}"
    if not (folder / "config.json").exists():
        torch.manual_seed(seed)
        dense = LlamaForCausalLM(LlamaConfig(**SIZES))
        began = time.process_time()
        with tqdm(
            total=TRAINING["updates"], desc=f"seed {seed}: dense", mininterval=10
        ) as progress:
            train(dense, rows, first, TRAINING, progress)
        seconds = time.process_time() - began
        loss = evaluate(dense, valid)
        content = {"seed": seed, "loss": loss, "cpu_seconds": seconds}
        content["parameters"] = sum(p.numel() for p in dense.parameters())
        record(output / f"base-seed{seed}.json", content)
        partial = folder.with_suffix(".partial")
        dense.save_pretrained(partial)
        (partial / "provenance.json").write_text(json.dumps(MADE_BY), encoding="utf-8")
        os.replace(partial, folder)
    maker = folder / "provenance.json"
    base_commit = (
        json.loads(maker.read_text(encoding="utf-8"))["commit"] if maker.exists() else None
    )
    for name in ARMS:
        path = output / f"{name.replace(' ', '_').lower()}-seed{seed}.json"
        if path.exists():
            continue
        model = arm_of(name, LlamaForCausalLM.from_pretrained(folder))
        before = evaluate(model, valid)
        torch.manual_seed(seed)
        began = time.process_time()
        with tqdm(total=TUNING["updates"], desc=f"seed {seed}: {name}", mininterval=10) as progress:
            train(model, rows, second, TUNING, progress)
        seconds = time.process_time() - began
        content = {"arm": name, "seed": seed, "before": before, "loss": evaluate(model, valid)}
        record(path, {**content, "base_commit": base_commit, "cpu_seconds": seconds})


def report(output: Path) -> None:
    """Print the table of the seeds that all arms have, and write it to report.json."""
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in ARMS}
    for path in sorted(output.glob("*-seed*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "arm" in content:
            found[content["arm"]][content["seed"]] = content
    seeds = sorted(set.intersection(*(set(runs) for runs in found.values())))
    content: dict[str, Any] = {"seeds": seeds, "arms": {}, "compared": []}
    print("| Heads of a token | before tuning | after |\n| --- | --: | --: |")
    for name, runs in found.items():
        means = {
            key: sum(runs[seed][key] for seed in seeds) / max(1, len(seeds))
            for key in ("before", "loss")
        }
        content["arms"][name] = means
        print(f"| {name} | {means['before']:.4f} | {means['loss']:.4f} |")
    lines: list[str] = ["| Difference | mean | 95 % | p |", "| --- | --: | --: | --: |"]
    for first, second in COMPARED:
        differences = [found[first][seed]["loss"] - found[second][seed]["loss"] for seed in seeds]
        if len(differences) > 1:
            row = paired(differences, 0)
            interval = f"{row.low:+.4f} … {row.high:+.4f}"
            lines.append(f"| {first} − {second} | {row.mean:+.4f} | {interval} | {row.p:.2g} |")
            values = {key: getattr(row, key) for key in ("n", "mean", "low", "high", "p")}
            content["compared"].append(
                {"first": first, "second": second, **values, "each": differences}
            )
    print("", *lines, sep="\n")
    with atomic_write(output / "report.json") as stream:
        json.dump(content, stream, indent=1)
        stream.write("\n")


def main() -> None:
    use_utf8()
    parser = argparse.ArgumentParser(
        description=__doc__.replace("%", "%%"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="folder", type=Path, required=True, help="folder of the text"
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 101")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "tuned_llama", help="dense models"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "results" / "tuned_llama", help="records"
    )
    parser.add_argument("--miniature", action="store_true", help="tiny sizes: to see that it works")
    args = parser.parse_args()
    if args.miniature:
        if args.output == parser.get_default("output") or args.work == parser.get_default("work"):
            parser.error(
                "--miniature needs --output DIR and --work DIR: its numbers are not results"
            )
        TRAINING.update(updates=4, warm_up=2)
        TUNING.update(updates=2, warm_up=1)
        globals()["ROWS"] = BATCH
    data = text(args.folder)
    for seed in range(101, 101 + args.seeds):
        run(seed, data, args.work, args.output)
    report(args.output)


if __name__ == "__main__":
    main()
