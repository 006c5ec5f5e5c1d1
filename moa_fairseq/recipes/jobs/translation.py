"""A translation: BPE, beam search and BLEU."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from typing import Any, List, Optional

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.chains import CHAINS, DEFAULT_CHAINS
from moa_fairseq.recipes.jobs.shared import preparing, scoring
from moa_fairseq.recipes.steps import Run, Step, stamp
from moa_fairseq.recipes.training import training_steps
from moa_fairseq.running.command_line import REDIRECT, flags, positional

log = logging.getLogger(__name__)


def steps(run: Run) -> List[Step]:
    """Preparation, training, average; then the translation of each subset, and its scores."""
    subsets = run.recipe.subsets
    return [
        *preparing(run),
        *training_steps(run),
        *(_generation(run, subset) for subset in subsets),
        *(_score(run, subset) for subset in subsets if run.recipe.score),
    ]


def _generation(run: Run, subset: str) -> Step:
    """The beam search, in fp32 so that scores do not depend on the hardware."""
    section, name = run.recipe.generate, f"generate-{subset}"
    output, captured = run.folder / f"{name}.txt", run.folder / f"{name}.partial"
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
    counter = _SentenceCounter(run.prepared.sentences.get(subset) if run.prepared else None)

    def finish() -> None:
        if not counter.count:
            raise UserError(
                f"fairseq-generate translated nothing of subset {subset}; see {run.log(name)} and {captured}."
            )
        os.replace(captured, output)

    words = [*flags(values), *run.device_flags()]
    return Step(
        name,
        "generate",
        ["fairseq-generate", positional(run.data), *words, REDIRECT, str(output)],
        lambda: run.model_inputs(section, subset),
        output,
        captured,
        watch=counter,
        finish=finish,
        remember=lambda: run.model_origin(section),
    )


def _score(run: Run, subset: str) -> Step:
    """The scoring of the translations, by the headline's chain, too."""
    section, translations = run.recipe.score, run.folder / f"generate-{subset}.txt"
    further = [name for name in CHAINS if name not in DEFAULT_CHAINS]
    headline = next((name for name in further if CHAINS[name].key == section.headline), None)
    values = {"target-lang": run.recipe.data.target, "also": headline, **section.flags, "json": True}

    def inputs() -> List[Any]:
        if not translations.is_file():
            raise UserError(f"{translations} is missing: run --stage generate first (or --stage all).")
        return [stamp(translations), dataclasses.asdict(section)]

    return scoring(run, subset, ["moa-fairseq", "score", positional(translations), *flags(values)], inputs)


class _SentenceCounter:
    """Counts the hypotheses that fairseq-generate has written and tells now and then."""

    def __init__(self, total: Optional[int]) -> None:
        self.count = 0
        self.total = f" of {total:,}" if total else ""
        self.step = max(100, (total or 1000) // 10)

    def __call__(self, line: str) -> None:
        if re.match(r"H-\d+\t", line):
            self.count += 1
            if self.count % self.step == 0:
                log.info("  %s%s sentences", f"{self.count:,}", self.total)
