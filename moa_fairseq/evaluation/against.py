"""Two translation systems compared: BLEU and chrF, and whether their difference could be chance."""

from typing import Any, Dict, List, Sequence

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics import BLEU, CHRF

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.chains import RunningText
from moa_fairseq.evaluation.significance import approximate_randomisation


def against(
    first: Sequence[RunningText], second: Sequence[RunningText], trials: int = 10_000
) -> Dict[str, Any]:
    """Mean scores of two systems, their difference and its two-sided p.

    first, second: the outputs of each system's seeds for one and the same test set. Raises UserError where
    references or the way of counting differ.
    """
    texts = [*first, *second]
    for number, text in enumerate(texts[1:], 2):
        if text.references != texts[0].references or text.settings != texts[0].settings:
            raise UserError(
                f"output {number} has other references than output 1, or other letters (lower-cased or not): "
                "only outputs of the same sentences can be compared. Generate both from one test set."
            )
    rows: List[Dict[str, Any]] = []
    metrics: Dict[str, Any] = {
        "BLEU": BLEU(**texts[0].settings, force=True),
        "chrF": CHRF(lowercase=texts[0].settings["lowercase"]),
    }
    for name, metric in metrics.items():

        def score(total: NDArray[np.float64], metric: Any = metric) -> float:
            return float(metric._compute_score_from_stats([int(count) for count in total]).score)

        ours, theirs = (  # of each system [S, N, F], as sacrebleu.significance takes them
            np.array([metric._extract_corpus_statistics(t.hypotheses, t.references) for t in system], float)
            for system in (first, second)
        )
        means = [float(np.mean([score(run) for run in runs.sum(axis=1)])) for runs in (ours, theirs)]
        rows.append(
            {
                "metric": name,
                "first": means[0],
                "second": means[1],
                "difference": means[0] - means[1],
                "p": approximate_randomisation(ours, theirs, score, trials=trials),
                "signature": f"{name}|{metric.get_signature()}",
            }
        )
    return {"sentences": len(texts[0].hypotheses), "outputs": [len(first), len(second)], "metrics": rows}
