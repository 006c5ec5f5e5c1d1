"""Two translation systems compared: BLEU and chrF, and whether their difference could be chance."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics import CHRF

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.chains import RunningText
from moa_fairseq.experiments.scoring.significance import approximate_randomisation, paired


def against(
    first: Sequence[RunningText], second: Sequence[RunningText], trials: int = 10_000
) -> dict[str, Any]:
    """Two systems' mean scores by BLEU and chrF, and whether their difference could be chance.

    Both p are two-sided. "p" covers the choice of sentences. "p_seeds", with the 95 % interval "low" to
    "high", covers the choice of seeds by a t test of pairs: the first outputs of both systems, the second
    outputs, and so on. It is left out for single outputs and for unequal numbers of outputs.

    Args:
        first, second: the outputs of each system, one for each seed, for the same test set.
        trials: the number of trials of the approximate randomisation for "p".

    Returns:
        "sentences", their number; "outputs", the number of outputs of each system; "metrics", for each metric
        a dictionary with "metric", "first", "second" and "difference" (first − second) in points, "p",
        "signature", and "low", "high" and "p_seeds" if there are pairs.

    Raises:
        UserError: if the references or the settings of the metrics differ.
    """
    output, *others = (*first, *second)
    for number, text in enumerate(others, 2):
        if text.references != output.references or _settings_of(text) != _settings_of(output):
            raise UserError(
                f"output {number} has other references than output 1, or other letters (lower-cased or not): "
                "only outputs of the same sentences can be compared. Generate both from one test set."
            )
    metrics = {"BLEU": output.bleu(), "chrF": CHRF(lowercase=output.lowercase)}
    rows = [_compare(name, metric, first, second, trials) for name, metric in metrics.items()]
    return {
        "sentences": len(output.hypotheses),
        "outputs": [len(first), len(second)],
        "metrics": rows,
    }


def _settings_of(text: RunningText) -> tuple[str, bool]:
    """The tokeniser and the case, which all compared outputs must share."""
    return text.tokenizer, text.lowercase


def _compare(
    name: str,
    metric: Any,
    first: Sequence[RunningText],
    second: Sequence[RunningText],
    trials: int,
) -> dict[str, Any]:
    """The row of one metric, see `against`."""

    def score(total: NDArray[np.float64]) -> float:
        return float(metric._compute_score_from_stats(list(map(int, total))).score)

    ours = _statistics(metric, first)
    theirs = _statistics(metric, second)
    scores = list(map(score, ours.sum(axis=1)))
    their_scores = list(map(score, theirs.sum(axis=1)))
    mean = float(np.mean(scores))
    baseline = float(np.mean(their_scores))
    row: dict[str, Any] = {
        "metric": name,
        "first": mean,
        "second": baseline,
        "difference": mean - baseline,
        "p": approximate_randomisation(ours, theirs, score, trials=trials),
    }
    if len(first) == len(second) > 1:
        test = paired([x - y for x, y in zip(scores, their_scores)], 0)
        row.update(low=test.low, high=test.high, p_seeds=test.p)
    row["signature"] = f"{name}|{metric.get_signature()}"
    return row


def _statistics(metric: Any, texts: Sequence[RunningText]) -> NDArray[np.float64]:
    """The sufficient statistics of each output and sentence, [S, N, F], as in sacrebleu.significance."""
    rows = [metric._extract_corpus_statistics(text.hypotheses, text.references) for text in texts]
    return np.array(rows, float)


def interval_of(row: Mapping[str, Any], decimals: int = 2) -> str | None:
    """The interval of a row as text, from "low" and "high"; None if the row lacks them."""
    if "low" not in row:
        return None
    return f"{row['low']:+.{decimals}f} … {row['high']:+.{decimals}f}"
