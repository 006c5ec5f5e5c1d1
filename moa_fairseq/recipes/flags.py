"""Before any work is done: the programs' own parsers are asked about a recipe's flags, and traps of scale."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Optional

from fairseq import options

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation import score
from moa_fairseq.evaluation.skeleton import parse_training_flags, quiet
from moa_fairseq.recipes.hardware import Hardware, precision_name
from moa_fairseq.recipes.loading import did_you_mean
from moa_fairseq.recipes.schema import CAUSAL_LM, SECTIONS, Recipe, reserved
from moa_fairseq.running.process import environment_of_a_child, flags

# Of the way from the minimum to the peak: more than this at the last update is worth a warning.
FAR_FROM_MINIMUM = 0.1
# Schedules that end: what they call their last rate, and what moves their end.
SCHEDULES = {
    "cosine": ("min_lr", "train.flags.warmup-updates plus lr-period-updates"),
    "polynomial_decay": ("end_learning_rate", "train.flags.total-num-update"),
    "tri_stage": ("final_lr_scale", "the steps of the stages"),
}


def check_flags(recipe: Recipe) -> argparse.Namespace:
    """Ask the program of each section about its flags; returns the training's as fairseq takes them.

    Raises UserError for a flag that its program does not know by that very name, or knows as one that is
    reserved; and for a training that fairseq's parser refuses, with its complaint.
    """
    said = {
        section: [name for name, value in values.flags.items() if value is not None]
        for section in SECTIONS
        if (values := getattr(recipe, section))
    }
    task = {"task": recipe.train.task}
    if recipe.train.task.startswith("translation"):
        task.update({"source-lang": recipe.data.source or "", "target-lang": recipe.data.target or ""})
    line = {**recipe.model.as_flags(), "criterion": recipe.train.criterion, **recipe.train.flags}
    line["tensorboard-logdir"] = None
    training, evaluation = options.get_training_parser(), options.get_generation_parser()
    if recipe.kind == CAUSAL_LM:
        evaluation = options.get_eval_lm_parser()
    refusal, words, asked = "fairseq does not accept the recipe's flags", flags({**task, **line}), flags(task)
    args = parse_training_flags(["DATA", *words], refusal, training)
    # which adds the task's flags to the parser
    parse_training_flags(["DATA", "--path", "MODEL", *asked], refusal, evaluation)
    scoring = argparse.ArgumentParser()
    score.add_arguments(scoring)
    programs = {
        "data": options.get_preprocessing_parser(),
        "model": training,
        "train": training,
        "generate": evaluation,
        "score": evaluation if recipe.kind == CAUSAL_LM else scoring,
    }
    for section, names in said.items():
        known = programs[section]._option_string_actions
        for name in names:
            if f"--{name}" not in known:
                near = did_you_mean(name, [word[2:] for word in known if word.startswith("--")])
                raise UserError(f"{section}.flags.{name}: its program has no such flag{near}.")
            if problem := reserved(section, known[f"--{name}"].dest):  # of a flag that has two names
                raise UserError(f"{section}.flags.{name}: {problem}")
    per_token, experts = (getattr(args, name, None) for name in ("experts_per_token", "num_experts"))
    if per_token and experts and per_token > experts:
        raise UserError(
            f"model.experts_per_token: K = {per_token} experts per token cannot be chosen from E = {experts} "
            f"(model.num_experts, where the recipe does not say it {args.arch}): lower K or raise E."
        )
    return args


def check_sharding(recipe: Recipe, hardware: Hardware) -> None:
    """Settings that fairseq would only refuse, or break on, once every process runs. Raises UserError."""
    asked = recipe.training_flags
    precision = precision_name(recipe.train.precision, hardware, recipe.model)
    backend, sharded = asked.get("ddp-backend"), asked.get("zero-sharding") == "os"
    flattened = not (asked.get("fp16-no-flatten-grads") or asked.get("memory-efficient-fp16"))
    for name in ("memory-efficient-fp16", "memory-efficient-bf16"):
        if asked.get(name) and precision != name[-4:]:
            raise UserError(
                f"train.flags.{name} goes with train.precision {name[-4:]}, and this run has "
                f"{precision} on {hardware.describe()}: change one of them."
            )
    if (sharded or backend in ("fully_sharded", "slowmo")) and importlib.util.find_spec("fairscale") is None:
        what = "zero-sharding os" if sharded else f"ddp-backend {backend}"
        raise UserError(
            f"train.flags.{what}: fairseq does it with the package fairscale, which is not installed: pip "
            "install fairscale, or save memory with --set train.flags.checkpoint-activations=true or a lower "
            "train.max_tokens."
        )
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


def schedule_warning(args: argparse.Namespace, updates: Optional[int]) -> Optional[str]:
    """A warning when the learning rate ends far from its minimum: the model would not have annealed.

    args: the training as fairseq parsed it. None when all is well, when the schedule has no minimum
    (inverse_sqrt, fixed) and when the number of updates is unknown.
    """
    if args.lr_scheduler not in SCHEDULES or updates is None:
        return None
    import torch
    from fairseq import optim
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = convert_namespace_to_omegaconf(args)
    optimizer = optim.build_optimizer(config.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    schedule = optim.lr_scheduler.build_lr_scheduler(config.lr_scheduler, optimizer)
    schedule.step_begin_epoch(1)
    rate = schedule.step_update(max(0, updates - 1))  # the rate after update n is that of update n + 1
    peak, (name, remedy) = max(config.optimization.lr), SCHEDULES[args.lr_scheduler]
    minimum = config.lr_scheduler[name] * (peak if name == "final_lr_scale" else 1)
    if rate - minimum <= FAR_FROM_MINIMUM * (peak - minimum):
        return None
    return (
        f"WARNING: the learning rate of the last update ({updates:,}) is {rate:.2g}, {rate / peak:.0%} of "
        f"its peak, and the minimum of the schedule ({args.lr_scheduler}) is {minimum:g}: the training ends "
        f"before it has annealed. Let {remedy} say the same end as train.max_update (or max_epoch)."
    )


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
