"""A translation: beam search and BLEU."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from typing import Any, Dict, List

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.chains import CHAINS, DEFAULT_CHAINS
from moa_fairseq.recipes.jobs.shared import read_scores
from moa_fairseq.recipes.schema import Generate, Score
from moa_fairseq.recipes.steps import OutputStep, Run, stamp
from moa_fairseq.running.command_line import REDIRECT, flags, positional

log = logging.getLogger(__name__)


def evaluation(run: Run) -> List[OutputStep]:
    """The translation of each subset, then its scores."""
    generate, score = run.recipe.generate, run.recipe.score
    if generate is None:
        return []
    translations = [_generation(run, generate, subset) for subset in generate.subsets]
    return [*translations, *(_score(run, score, subset) for subset in generate.subsets if score)]


def _generation(run: Run, section: Generate, subset: str) -> OutputStep:
    """The beam search, in fp32 so that scores do not depend on the hardware."""
    output = run.folder / f"generate-{subset}.txt"
    captured = output.with_suffix(".partial")
    values = {
        **run.task_flags(),
        "path": str(run.model),
        "gen-subset": subset,
        "beam": section.beam,
        "lenpen": section.lenpen,
        "max-tokens": section.max_tokens,
        "remove-bpe": section.remove_bpe,
        **section.flags,
    }
    translated, total = 0, run.prepared.sentences.get(subset, 0)
    pace, goal = max(100, (total or 1000) // 10), f" of {total:,}" if total else ""

    def watch(line: str) -> None:
        nonlocal translated
        if re.match(r"H-\d+\t", line):
            translated += 1
            if translated % pace == 0:
                log.info("  %s%s sentences", f"{translated:,}", goal)

    def finish() -> None:
        if not translated:
            where = f"see {run.log(output.stem)} and {captured}"
            raise UserError(f"fairseq-generate translated nothing of subset {subset}; {where}.")
        os.replace(captured, output)

    command = ["fairseq-generate", positional(run.data), *flags(values), *run.device_flags()]
    line = [*command, REDIRECT, str(output)]
    more: Dict[str, Any] = {"captured": captured, "watch": watch, "finish": finish}
    return run.evaluation("generate", line, output, section, subset, **more)


def _score(run: Run, section: Score, subset: str) -> OutputStep:
    """The scoring of the translations, by the headline's chain, too."""
    translations, output = (run.folder / name for name in (f"generate-{subset}.txt", f"score-{subset}.json"))
    further = [name for name in CHAINS if name not in DEFAULT_CHAINS]
    headline = next((name for name in further if CHAINS[name].key == section.headline), None)
    values = {"target-lang": run.recipe.data.target, "also": headline, **section.flags, "json": True}
    command = ["moa-fairseq", "score", positional(translations), *flags(values), REDIRECT, str(output)]

    def inputs() -> List[Any]:
        if not translations.is_file():
            raise UserError(f"{translations} is missing: run --stage generate first (or --stage all).")
        return [stamp(translations), dataclasses.asdict(section)]

    captured = output.with_suffix(".partial")
    return OutputStep(output.stem, "score", command, output, inputs, captured, scores=read_scores)
