"""The flags of a recipe's sections, as the parsers of their programs read them."""

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq import options

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.lengths import check_blocks
from moa_fairseq.experiments.recipes.loading import near_or_all
from moa_fairseq.experiments.recipes.rules import reserved
from moa_fairseq.experiments.recipes.schema import CAUSAL_LM, Recipe
from moa_fairseq.experiments.scoring import score
from moa_fairseq.experiments.scoring.meta_model import parse_training_flags
from moa_fairseq.process import flags


def check_flags(recipe: Recipe) -> argparse.Namespace:
    """Check each section's flags with the parser of its program.

    Returns:
        The training's flags, as fairseq parses them.

    Raises:
        UserError: for a flag that its program does not have under exactly that name, and for a
            reserved flag; for flags that fairseq's parser rejects, with its complaint; for an evaluation of
            blocks that are longer than the model; and for more experts per token than there are.
    """
    refusal = "fairseq does not accept the recipe's flags"
    task_flags = recipe.task_flags
    line = (
        task_flags
        | recipe.model.as_flags()
        | {"criterion": recipe.train.criterion}
        | recipe.train.flags
    )
    training = options.get_training_parser()
    evaluation = options.get_generation_parser()
    if recipe.kind == CAUSAL_LM:
        evaluation = options.get_eval_lm_parser()
    args = parse_training_flags(
        ["DATA", *flags(line | {"tensorboard-logdir": None})], refusal, training
    )
    # Parsing adds the task's flags to the parser
    parse_training_flags(["DATA", "--path", "MODEL", *flags(task_flags)], refusal, evaluation)
    programs = {"data": options.get_preprocessing_parser(), "model": training, "train": training}
    programs.update(generate=evaluation, score=evaluation)
    if recipe.kind != CAUSAL_LM:
        programs["score"] = argparse.ArgumentParser()
        score.add_arguments(programs["score"])
    for section, program in programs.items():
        if values := getattr(recipe, section):
            _check_names(section, values.flags, program)
    if recipe.kind == CAUSAL_LM and recipe.score:
        words = flags(task_flags | recipe.score.flags)
        parser = options.get_eval_lm_parser()
        check_blocks(
            recipe, args, parse_training_flags(["DATA", "--path", "MODEL", *words], refusal, parser)
        )
    per_token = getattr(args, "experts_per_token", None)
    experts = getattr(args, "num_experts", None)
    if per_token and experts and per_token > experts:
        raise UserError(
            f"model.experts_per_token: K = {per_token} experts per token exceed E = {experts} "
            f"(model.num_experts, by default that of {args.arch}). Lower K or raise E."
        )
    return args


def _check_names(
    section: str, section_flags: Mapping[str, Any], program: argparse.ArgumentParser
) -> None:
    """Raise UserError for a flag that a section's program lacks, and for a reserved flag."""
    actions = program._option_string_actions
    for name, value in section_flags.items():
        if value is None:
            continue
        if f"--{name}" not in actions:
            near = near_or_all(name, [word[2:] for word in actions if word.startswith("--")])
            raise UserError(
                f"{section}.flags.{name}: the section's program has no such flag{near}."
            )
        problem = reserved(section, actions[f"--{name}"].dest)  # a flag may have two names
        if problem:
            raise UserError(f"{section}.flags.{name}: {problem}")
