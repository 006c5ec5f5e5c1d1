"""Steps that several kinds of recipes have."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, List

from moa_fairseq.data_prep.binarised import preprocess_calls
from moa_fairseq.data_prep.catalogue import datasets
from moa_fairseq.errors import UserError
from moa_fairseq.json_files import MAPPING, TEXT, check_kinds, is_number, read_json
from moa_fairseq.recipes.schema import HEADLINE_METRICS, Score
from moa_fairseq.recipes.steps import OutputStep, Run, Step
from moa_fairseq.running.command_line import REDIRECT, flags


def preparing(run: Run) -> List[Step]:
    """The commands that prepare the data; none for data that is used as it is.

    What happens between them (download, cleaning, BPE) is done inside of this program.
    """
    if run.root is None:
        return []
    corpus = [["moa-fairseq", "corpus", "--output", str(run.corpus)]] if run.corpus else []
    settings = dataclasses.asdict(run.recipe.data)
    calls = preprocess_calls(settings, datasets()[settings["recipe"]], run.root, run.data, run.recipe.splits)
    commands = [*corpus, *(["fairseq-preprocess", *flags(values)] for values in calls)]
    return [Step(command[0], "prepare", command) for command in commands]


def checkpoint_scores(run: Run, flag: str) -> List[OutputStep]:
    """`moa-fairseq score` of the checkpoint on each subset; `flag` is the one that takes the checkpoint.

    In fp32, so that scores do not depend on the hardware.
    """
    section = run.recipe.score or Score()
    found = []
    for subset in section.subsets:
        model = {flag: str(run.model), "data": str(run.data), "subset": subset}
        own = flags({"user-dir": run.user_dir})
        command = ["moa-fairseq", *own, "score", *flags({**model, **section.flags, "json": True})]
        output = run.folder / f"score-{subset}.json"
        line = [*command, *run.device_flags(), REDIRECT, str(output)]
        captured = output.with_suffix(".partial")
        found.append(run.evaluation("score", line, output, section, captured=captured, scores=read_scores))
    return found


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
