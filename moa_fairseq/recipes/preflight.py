"""Before any work is done: fairseq's own parser is asked about the training command, and traps of scale."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional

from moa_fairseq.errors import UserError
from moa_fairseq.recipes.batch import plan_batch, planned_updates, training_set
from moa_fairseq.recipes.hardware import Hardware, precision_name
from moa_fairseq.recipes.schema import Recipe
from moa_fairseq.running.process import environment_of_a_child

LOUD_DEVIATION = 0.01
# Of the way from the minimum to the peak: more than this at the last update is worth a warning.
FAR_FROM_MINIMUM = 0.1
FAIRSCALE_REMEDY = (
    "fairseq does it with the package fairscale, which is not installed: pip install fairscale, or save "
    "memory with --set train.flags.checkpoint-activations=true or a lower train.max_tokens."
)


class Schedule(NamedTuple):
    """A schedule that ends. minimum: its last rate, by config and peak. remedy: what moves its end."""

    minimum: Callable[[Any, float], float]
    remedy: str


SCHEDULES = {
    "cosine": Schedule(lambda own, _: own.min_lr, "train.flags.warmup-updates plus lr-period-updates"),
    "polynomial_decay": Schedule(lambda own, peak: own.end_learning_rate, "train.flags.total-num-update"),
    "tri_stage": Schedule(lambda own, peak: own.final_lr_scale * peak, "the steps of the stages"),
}


def fairseq_is_installed() -> bool:
    """True when this Python can import fairseq."""
    return importlib.util.find_spec("fairseq") is not None


def check_scale(recipe: Recipe, hardware: Hardware) -> Optional[str]:
    """Settings that fairseq would only refuse, or break on, once every process runs.

    Returns a warning to print, or None. Raises UserError with the remedy.
    """
    asked = recipe.training_flags
    _check_sharding(asked, precision_name(recipe.train.precision, hardware, recipe.model), hardware)
    batch = plan_batch(recipe.train, hardware.devices)
    if abs(batch.deviation) > LOUD_DEVIATION:
        return (
            f"WARNING: {hardware.devices} devices cannot share {batch.wanted:,} tokens evenly; an update has "
            f"{batch.effective:,} ({batch.deviation:+.1%}). Another number of devices or --set "
            "train.max_tokens=... comes nearer."
        )
    return None


def _check_sharding(asked: dict, precision: str, hardware: Hardware) -> None:
    backend, sharded = asked.get("ddp-backend"), asked.get("zero-sharding") == "os"
    for name in ("memory-efficient-fp16", "memory-efficient-bf16"):
        if asked.get(name) and precision != name[-4:]:
            raise UserError(
                f"train.flags.{name} goes with train.precision {name[-4:]}, and this run has "
                f"{precision} on {hardware.describe()}: change one of them."
            )
    if (sharded or backend in ("fully_sharded", "slowmo")) and importlib.util.find_spec("fairscale") is None:
        what = "train.flags.zero-sharding os" if sharded else f"train.flags.ddp-backend {backend}"
        raise UserError(f"{what}: {FAIRSCALE_REMEDY}")
    flattened = not (asked.get("fp16-no-flatten-grads") or asked.get("memory-efficient-fp16"))
    if sharded and precision == "fp16" and flattened:
        raise UserError(
            "train.flags.zero-sharding os with fp16 needs --set train.flags.fp16-no-flatten-grads=true, or "
            "memory-efficient-fp16."
        )
    if backend == "fully_sharded" and precision == "bf16":
        raise UserError(
            "fairseq's fully_sharded knows fp32 and fp16 only: add --set train.precision=fp16, or use "
            "--set train.flags.zero-sharding=os instead."
        )
    if hardware.world and not hardware.gpus and backend not in (None, "legacy_ddp", "no_c10d"):
        raise UserError(f"train.flags.ddp-backend {backend} works on GPUs only: leave it out on the CPU.")


def check_schedule(
    recipe: Recipe, hardware: Hardware, args: argparse.Namespace, data: Optional[Path] = None
) -> Optional[str]:
    """A warning when the schedule ends far from its minimum: the model would not have annealed.

    args: the training line as fairseq parsed it. data: a binarised folder, where epochs and not updates say
    how long the training is; without one the known size of the corpus counts. None when all is well, when
    the schedule has no minimum (inverse_sqrt, fixed) and when the number of updates is unknown.
    """
    about = SCHEDULES.get(args.lr_scheduler)
    if about is None:
        return None
    size = training_set(recipe, data) if recipe.train.max_epoch else None
    updates = planned_updates(recipe.train, plan_batch(recipe.train, hardware.devices), size)
    if updates is None:
        return None
    import torch
    from fairseq import optim

    config = full_config(args)
    optimizer = optim.build_optimizer(config.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    schedule = optim.lr_scheduler.build_lr_scheduler(config.lr_scheduler, optimizer)
    schedule.step_begin_epoch(1)
    rate = schedule.step_update(max(0, updates - 1))  # the rate after update n is that of update n + 1
    peak = max(config.optimization.lr)
    minimum = about.minimum(config.lr_scheduler, peak)
    if rate - minimum <= FAR_FROM_MINIMUM * (peak - minimum):
        return None
    return (
        f"WARNING: the learning rate of the last update ({updates:,}) is {rate:.2g}, {rate / peak:.0%} of "
        f"its peak, and the minimum of the schedule ({args.lr_scheduler}) is {minimum:g}: the training ends "
        f"before it has annealed. Let {about.remedy} say the same end as train.max_update (or max_epoch)."
    )


def check_train_command(command: List[str]) -> argparse.Namespace:
    """Parse a `fairseq-train` line as fairseq would. Raises UserError with fairseq's own complaint."""
    if not fairseq_is_installed():
        raise UserError(
            f"fairseq is not installed in {sys.executable}: run `bash scripts/setup.sh` in the checkout or "
            "`pip install ve-fairseq==0.12.3`, or use the Python of an environment that has it."
        )
    from moa_fairseq.evaluation.skeleton import parse_training_flags

    args = parse_training_flags(command[1:], "fairseq-train does not accept the recipe's flags")
    per_token, experts = (getattr(args, name, None) for name in ("experts_per_token", "num_experts"))
    if per_token and experts and per_token > experts:
        raise UserError(
            f"model.experts_per_token: K = {per_token} experts per token cannot be chosen from E = {experts} "
            f"(model.num_experts, where the recipe does not say it {args.arch}): lower K or raise E."
        )
    return args


def check_plugin(user_dir: Path) -> None:
    """Raise UserError unless fairseq, given this folder as --user-dir, imports moa_fairseq along with it."""
    code = (
        "import argparse, sys; from fairseq.utils import import_user_module; "
        "import_user_module(argparse.Namespace(user_dir=sys.argv[1])); print('moa_fairseq' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(user_dir)],
        env=environment_of_a_child(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stdout.split()[-1:] != ["True"]:
        why = done.stderr.splitlines()[-1] if done.returncode else "it does not import this package"
        raise UserError(
            f"--user-dir {user_dir} cannot stand for this package in fairseq's commands: {why}. Write "
            "`import moa_fairseq` at the top of its __init__.py, and see that it can be imported by itself."
        )


def full_config(args: argparse.Namespace) -> Any:
    """fairseq's config of a parsed training line, defaults included, without hydra's warnings."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    from moa_fairseq.evaluation.skeleton import quiet

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert_namespace_to_omegaconf(args)
