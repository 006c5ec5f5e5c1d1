"""Steps that several kinds of recipes have."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Callable, Dict, List

from moa_fairseq.data_prep.binarised import preprocess_calls
from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.errors import UserError
from moa_fairseq.json_files import MAPPING, TEXT, check_kinds, is_number, read_json
from moa_fairseq.recipes.schema import HEADLINE_METRICS
from moa_fairseq.recipes.steps import Run, Step, keep_scores
from moa_fairseq.running.command_line import REDIRECT, flags


def preparing(run: Run) -> List[Step]:
    """The commands of the preparation, none for data used as it is; what is between them runs here."""
    if run.root is None:
        return []
    corpus = [["moa-fairseq", "corpus", "--output", str(run.corpus)]] if run.corpus else []
    settings = dataclasses.asdict(run.recipe.data)
    calls = preprocess_calls(settings, datasets()[settings["recipe"]], run.root, run.data, run.recipe.splits)
    commands = [*corpus, *(["fairseq-preprocess", *flags(values)] for values in calls)]
    return [Step(command[0], "prepare", command) for command in commands]


def scoring_of_the_model(run: Run, model_flag: str) -> List[Step]:
    """`moa-fairseq score` of the checkpoint, in fp32, so that scores do not depend on the hardware.

    model_flag: the flag that takes the checkpoint.
    """
    found = []
    for subset in run.recipe.subsets:
        values = {
            **{model_flag: str(run.model), "data": str(run.data), "subset": subset},
            **run.recipe.score.flags,
            "json": True,
        }
        command = ["moa-fairseq", "score", *flags(values), *run.device_flags()]
        found.append(scoring(run, subset, command, reads_model=True))
    return found


def scoring(
    run: Run,
    subset: str,
    command: List[str],
    inputs: Callable[[], List[Any]] = list,
    reads_model: bool = False,
) -> Step:
    """The step of a `moa-fairseq score --json` line; reads_model: it scores the checkpoint itself."""
    output, section = run.folder / f"score-{subset}.json", run.recipe.score
    captured = output.with_suffix(".partial")
    return Step(
        output.stem,
        "score",
        [*command, REDIRECT, str(output)],
        (lambda: run.model_inputs(section)) if reads_model else inputs,
        output,
        captured,
        finish=functools.partial(keep_scores, captured, output, read_scores),
        remember=(lambda: run.model_origin(section)) if reads_model else dict,
    )


def read_scores(path: Path) -> Dict[str, Any]:
    """What `moa-fairseq score --json` printed. Raises UserError for a damaged file."""
    remedy = "It should hold what moa-fairseq score --json prints: delete it and run --stage score again."
    scores = read_json(path, remedy)
    metrics = dict.fromkeys(HEADLINE_METRICS, MAPPING)
    check_kinds(scores, {**metrics, "meta": MAPPING, "sacrebleu_signature": TEXT}, str(path), remedy)
    check_kinds(scores.get("meta") or {}, {"evaluation": MAPPING}, f"{path}: meta", remedy)
    for name in metrics.keys() & scores.keys():
        check_kinds(scores[name], {"signature": TEXT}, f"{path}: {name}", remedy, required=("score",))
        for key in ("score", "sd"):  # that of a diverged model is a float, too, though no number
            value = scores[name].get(key)
            if not (value is None or isinstance(value, float) or is_number(value)):
                raise UserError(f"{path}: {name}.{key} must be a number. {remedy}")
    return scores
