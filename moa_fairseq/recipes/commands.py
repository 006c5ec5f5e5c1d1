"""A recipe becomes fairseq command lines. Pure: no file is touched, the hardware comes as an argument."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional

from moa_fairseq.evaluation.chains import CHAINS, DEFAULT_CHAINS
from moa_fairseq.recipes.finetune import pretrained_checkpoint
from moa_fairseq.recipes.hardware import Hardware, precision_flags
from moa_fairseq.recipes.schema import Recipe, Train
from moa_fairseq.running.command_line import REDIRECT, flags, positional


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How one update's tokens are spread over devices and accumulation steps."""

    devices: int
    update_freq: int
    max_tokens: int
    wanted: Optional[int]

    @property
    def effective(self) -> int:
        """Tokens of one update, padding included."""
        return self.devices * self.update_freq * self.max_tokens

    def describe(self) -> str:
        """One line for the log, rounding included."""
        line = (
            f"{self.devices} device(s) x update-freq {self.update_freq} x max-tokens {self.max_tokens:,} "
            f"= {self.effective:,} tokens per update"
        )
        if self.wanted and self.wanted != self.effective:
            line += f" ({self.wanted:,} asked for, {self.deviation:+.2%} by rounding)"
        return line

    @property
    def deviation(self) -> float:
        """How far the update is from the one that was asked for, as a fraction of it."""
        return self.effective / self.wanted - 1 if self.wanted else 0.0


@dataclasses.dataclass(frozen=True)
class RunPaths:
    """Where a run's files are. data: binarised folder; save_dir: run folder; user_dir: the plugin."""

    data: Path
    save_dir: Path
    user_dir: Path

    @property
    def checkpoints(self) -> Path:
        """fairseq's --save-dir."""
        return self.save_dir / "checkpoints"

    def model(self, recipe: Recipe) -> Path:
        """The checkpoint that is evaluated."""
        if recipe.finetune == "noft":
            return pretrained_checkpoint(recipe.pretrained)
        return self.save_dir / "average.pt" if recipe.average else self.checkpoints / "checkpoint_best.pt"


def plan_batch(train: Train, devices: int) -> BatchPlan:
    """Keep the effective batch on any number of devices.

    The fewest accumulation steps that respect train.max_tokens, then --max-tokens lowered so that
    devices x steps x max-tokens is the effective batch, short of it by less than devices x steps. Where that
    would go below train.min_tokens, fewer steps.
    """
    wanted = train.effective_batch_tokens
    if wanted is None:
        return BatchPlan(devices, 1, train.max_tokens, None)
    floor = min(train.min_tokens or 1, train.max_tokens, wanted)
    steps = max(1, min(-(-wanted // (devices * train.max_tokens)), wanted // (devices * floor)))
    share = min(train.max_tokens, wanted // (devices * steps))
    return BatchPlan(devices, steps, max(floor, share), wanted)


def train_command(recipe: Recipe, hardware: Hardware, paths: RunPaths) -> List[str]:
    """The fairseq-train line of a recipe."""
    train, model = recipe.train, recipe.model
    batch = plan_batch(train, hardware.devices)
    command = ["fairseq-train", positional(paths.data), *_task_flags(recipe, paths)]
    command += flags(
        {
            "arch": model.arch,
            "num-experts": model.num_experts,
            "experts-per-token": model.experts_per_token,
            "expert-dim": model.expert_dim,
            "share-all-embeddings": model.share_all_embeddings,
            **model.flags,
            "criterion": train.criterion,
            **scale_flags(hardware),
            **train.flags,
            "max-tokens": batch.max_tokens,
            "update-freq": batch.update_freq,
            "max-epoch": train.max_epoch,
            "max-update": train.max_update,
            "seed": train.seed,
            "keep-last-epochs": train.keep_last_epochs,
            "save-dir": str(paths.checkpoints),
            "log-format": "json",
            "log-interval": train.log_interval,
            **(hardware.world.flags() if hardware.world else {"distributed-world-size": hardware.devices}),
        }
    )
    return command + precision_flags(train.precision, hardware, model) + device_flags(hardware)


def scale_flags(hardware: Hardware) -> Dict[str, Any]:
    """How several processes talk; a recipe's train.flags go over it.

    fairseq's own choice (nccl, pytorch_ddp) is for GPUs only. No recipe needs --find-unused-parameters: an
    expert that no token chose has a gradient of zeros.
    """
    if hardware.world and not hardware.gpus:
        return {"distributed-backend": "gloo", "ddp-backend": "legacy_ddp"}
    return {}


def average_command(recipe: Recipe, paths: RunPaths) -> List[str]:
    """The averaging of the last checkpoints."""
    return [
        "moa-fairseq",
        "average",
        *flags(
            {
                "inputs": str(paths.checkpoints),
                "num-epoch-checkpoints": recipe.average.epochs,
                "num-update-checkpoints": recipe.average.updates,
                "output": str(paths.save_dir / "average.pt"),
            }
        ),
    ]


def generate_command(recipe: Recipe, hardware: Hardware, paths: RunPaths, subset: str) -> List[str]:
    """The beam search over one subset, in fp32 so that scores do not depend on the hardware."""
    generate = recipe.generate
    return [
        "fairseq-generate",
        positional(paths.data),
        *_task_flags(recipe, paths),
        *flags(
            {
                "path": str(paths.model(recipe)),
                "gen-subset": subset,
                "beam": generate.beam,
                "lenpen": generate.lenpen,
                "max-tokens": generate.max_tokens,
                "remove-bpe": generate.remove_bpe,
                **generate.flags,
            }
        ),
        *device_flags(hardware),
        *(REDIRECT, str(paths.save_dir / f"generate-{subset}.txt")),
    ]


def score_command(recipe: Recipe, output: Path) -> List[str]:
    """The scoring of one fairseq-generate log, as JSON on stdout, the headline's chain included."""
    further = [name for name in CHAINS if name not in DEFAULT_CHAINS]
    headline = next((name for name in further if CHAINS[name].key == recipe.score.headline), None)
    values = {"target-lang": recipe.data.target, "also": headline, **recipe.score.flags, "json": True}
    scores = output.with_name(output.name.replace("generate-", "score-")).with_suffix(".json")
    return ["moa-fairseq", "score", positional(output), *flags(values), REDIRECT, str(scores)]


def device_environment(hardware: Hardware, present: Hardware) -> Dict[str, str]:
    """CUDA_VISIBLE_DEVICES where a run uses fewer GPUs than torch sees."""
    restrict = 0 < hardware.gpus < present.gpus
    return {"CUDA_VISIBLE_DEVICES": ",".join(hardware.visible)} if restrict else {}


def _task_flags(recipe: Recipe, paths: RunPaths) -> List[str]:
    task = {"user-dir": str(paths.user_dir), "task": recipe.train.task}
    if recipe.train.task.startswith("translation"):
        task.update({"source-lang": recipe.data.source, "target-lang": recipe.data.target})
    return flags(task)


def device_flags(hardware: Hardware) -> List[str]:
    """--cpu for a run without GPUs."""
    return [] if hardware.gpus else ["--cpu"]
