"""Two translation systems compared: BLEU and chrF, and whether their difference could be chance."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics import CHRF

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.chains import RunningText
from moa_fairseq.experiments.scoring.significance import approximate_randomisation, paired


def compare_systems(
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
    outputs = [*first, *second]
    for number, output in enumerate(outputs, 1):
        if _common_settings(output) != _common_settings(outputs[0]):
            raise UserError(
                f"output {number} has other references than output 1, or other letters (lower-cased or not): "
                "only outputs of the same sentences can be compared. Generate both from one test set."
            )
    metrics = {"BLEU": outputs[0].bleu(), "chrF": CHRF(lowercase=outputs[0].lowercase)}
    return {
        "sentences": len(outputs[0].hypotheses),
        "outputs": [len(first), len(second)],
        "metrics": [
            _metric_row(name, metric, first, second, trials) for name, metric in metrics.items()
        ],
    }


def _common_settings(output: RunningText) -> tuple[Any, str, bool]:
    """The references, the tokeniser and the case, which all compared outputs must share."""
    return output.references, output.tokenizer, output.lowercase


def _metric_row(
    name: str,
    metric: Any,
    first: Sequence[RunningText],
    second: Sequence[RunningText],
    trials: int,
) -> dict[str, Any]:
    """The row of one metric, see `compare_systems`."""

    def score(total: NDArray[np.float64]) -> float:
        return float(metric._compute_score_from_stats(list(map(int, total))).score)

    first_statistics = _statistics(metric, first)
    second_statistics = _statistics(metric, second)
    first_scores = list(map(score, first_statistics.sum(axis=1)))
    second_scores = list(map(score, second_statistics.sum(axis=1)))
    first_mean = float(np.mean(first_scores))
    second_mean = float(np.mean(second_scores))
    row: dict[str, Any] = {
        "metric": name,
        "first": first_mean,
        "second": second_mean,
        "difference": first_mean - second_mean,
        "p": approximate_randomisation(first_statistics, second_statistics, score, trials),
    }
    if len(first) == len(second) > 1:
        differences = [x - y for x, y in zip(first_scores, second_scores)]
        test = paired(differences, margin=0)  # without a test of equivalence
        row.update(low=test.low, high=test.high, p_seeds=test.p)
    row["signature"] = f"{name}|{metric.get_signature()}"
    return row


# sacreBLEU's public functions take texts. A test scores sums of the sentences' statistics instead, for which
# sacrebleu.significance calls the same private functions.
def _statistics(metric: Any, texts: Sequence[RunningText]) -> NDArray[np.float64]:
    """The sufficient statistics of each output and sentence, [S, N, F]."""
    rows = [metric._extract_corpus_statistics(text.hypotheses, text.references) for text in texts]
    return np.array(rows, float)


def interval_of(row: Mapping[str, Any], decimals: int = 2) -> str | None:
    """The interval of a row as text, from "low" and "high"; None if the row lacks them."""
    if "low" not in row:
        return None
    return f"{row['low']:+.{decimals}f} … {row['high']:+.{decimals}f}"
