"""The flags of a recipe's sections, as the parsers of their programs read them."""

import argparse

from fairseq import options

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.lengths import check_blocks
from moa_fairseq.experiments.recipes.loading import near_or_all
from moa_fairseq.experiments.recipes.rules import reserved
from moa_fairseq.experiments.recipes.schema import CAUSAL_LM, Recipe
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.experiments.scoring import score
from moa_fairseq.experiments.scoring.meta_model import parse_training_flags
from moa_fairseq.process import flags


def check_flags(recipe: Recipe) -> argparse.Namespace:
    """Check each section's flags with the parser of its program.

    Returns:
        The training's flags, as fairseq parses them.

    Raises:
        UserError: for a flag that its program does not have under exactly that name or rejects, and for a
            reserved flag; for an evaluation of blocks that are longer than the model; and for more experts
            per token than there are.
    """
    task_flags = recipe.task_flags
    training_flags = (
        task_flags
        | recipe.model.as_flags()
        | {"criterion": recipe.train.criterion}
        | recipe.train.flags
        | {"tensorboard-logdir": None}  # a check makes no folder
    )
    training_parser = options.get_training_parser()
    training_args = _parse(training_flags, training_parser)
    is_causal = recipe.kind == CAUSAL_LM
    get_parser = options.get_eval_lm_parser if is_causal else options.get_generation_parser
    evaluation_parser = score_parser = get_parser()
    # Parsing adds the task's flags to the parser
    _parse({"path": "MODEL"} | task_flags, evaluation_parser)
    if not is_causal:
        score_parser = argparse.ArgumentParser()
        score.add_arguments(score_parser)
    parsers = {
        "data": options.get_preprocessing_parser(),
        "model": training_parser,
        "train": training_parser,
        "generate": evaluation_parser,
        "score": score_parser,
    }
    for section, parser in parsers.items():
        if values := getattr(recipe, section):
            _check_names(section, values.flags, parser)
    if is_causal and recipe.score:
        evaluation_flags = {"path": "MODEL"} | task_flags | recipe.score.flags
        check_blocks(recipe, training_args, _parse(evaluation_flags, get_parser()))
    _check_experts(training_args)
    return training_args


def _parse(values: Values, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse flags for data that need not exist. A parser is used once: it changes."""
    refusal = "fairseq does not accept the recipe's flags"
    return parse_training_flags(["DATA", *flags(values)], refusal, parser)


def _check_experts(args: argparse.Namespace) -> None:
    """Raise UserError for more experts per token than there are."""
    per_token = getattr(args, "experts_per_token", None)
    experts = getattr(args, "num_experts", None)
    if per_token and experts and per_token > experts:
        raise UserError(
            f"model.experts_per_token: K = {per_token} experts per token exceed E = {experts} "
            f"(model.num_experts, by default that of {args.arch}). Lower K or raise E."
        )


def _check_names(section: str, section_flags: Values, parser: argparse.ArgumentParser) -> None:
    """Raise UserError for a flag that a section's program lacks, and for a reserved flag."""
    actions = parser._option_string_actions
    for name, value in section_flags.items():
        if value is None:
            continue
        if f"--{name}" not in actions:
            near = near_or_all(name, [word[2:] for word in actions if word.startswith("--")])
            raise UserError(
                f"{section}.flags.{name}: the section's program has no such flag{near}."
            )
        if problem := reserved(section, actions[f"--{name}"].dest):  # a flag may have two names
            raise UserError(f"{section}.flags.{name}: {problem}")
