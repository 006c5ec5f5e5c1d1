"""Corpus BLEU on white-space tokens, digit for digit that of Moses' `multi-bleu.perl`."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from moa_fairseq.errors import UserError

MAX_ORDER = 4


@dataclass(frozen=True)
class Bleu:
    """A corpus BLEU: `score` and `precisions` of orders 1 to 4 in per cent, lengths in tokens."""

    score: float
    precisions: Tuple[float, ...]
    bp: float
    hyp_len: int
    ref_len: int

    def __str__(self) -> str:
        """The line that multi-bleu.perl prints."""
        if self.ref_len == 0:
            return "BLEU = 0, 0/0/0/0 (BP=0, ratio=0, hyp_len=0, ref_len=0)"
        orders = "/".join(f"{precision:.1f}" for precision in self.precisions)
        return (
            f"BLEU = {self.score:.2f}, {orders} (BP={self.bp:.3f}, ratio={self.hyp_len / self.ref_len:.3f}, "
            f"hyp_len={self.hyp_len}, ref_len={self.ref_len})"
        )

    def as_dict(self) -> Dict[str, object]:
        """The same for JSON, unrounded."""
        return {
            "score": self.score,
            "precisions": list(self.precisions),
            "bp": self.bp,
            "hyp_len": self.hyp_len,
            "ref_len": self.ref_len,
        }


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool = False
) -> Bleu:
    """BLEU-4 of `hypotheses` against one or more `references`, as multi-bleu.perl defines it.

    hypotheses: one tokenised line each. references: one sequence of lines per reference. lowercase:
    its -lc, which lowers ASCII letters only. Counts are clipped by the largest count in any reference. The
    reference length is the one closest to the hypothesis (of two equally close, the shorter). Nothing is
    smoothed: an order without a match makes the score 0.

    It differs where the script misleads: unequal numbers of lines raise UserError (the script ignores missing
    hypotheses), an all-empty output scores 0 (the script divides by zero), and the last line counts in full
    even without a line end (the script drops a character).
    """
    for number, reference in enumerate(references, 1):
        if len(reference) != len(hypotheses):
            raise UserError(
                f"{len(hypotheses)} hypotheses but {len(reference)} lines in reference {number}: BLEU needs "
                f"the same number of lines. Check that both stem from the same test set and are complete."
            )
    matched, total = [0] * MAX_ORDER, [0] * MAX_ORDER
    hyp_len = ref_len = 0
    for index, line in enumerate(hypotheses):
        words = _words(line, lowercase)
        alternatives = [_words(reference[index], lowercase) for reference in references]
        hyp_len += len(words)
        ref_len += min((abs(len(other) - len(words)), len(other)) for other in alternatives)[1]
        for order in range(1, MAX_ORDER + 1):
            counts = _ngrams(words, order)
            allowed: Counter = Counter()
            for other in alternatives:
                allowed |= _ngrams(other, order)
            total[order - 1] += sum(counts.values())
            matched[order - 1] += sum((counts & allowed).values())
    return _bleu(matched, total, hyp_len, ref_len)


def _bleu(matched: List[int], total: List[int], hyp_len: int, ref_len: int) -> Bleu:
    precisions = [m / t if t else 0.0 for m, t in zip(matched, total)]
    if hyp_len == 0 or ref_len == 0:
        return Bleu(0.0, tuple(precisions), 0.0, hyp_len, ref_len)
    penalty = math.exp(1 - ref_len / hyp_len) if hyp_len < ref_len else 1.0
    # multi-bleu.perl's log of 0; its exponential is exactly 0.
    logs = [math.log(precision) if precision else -9999999999.0 for precision in precisions]
    score = penalty * math.exp(sum(logs) / MAX_ORDER)
    return Bleu(100 * score, tuple(100 * precision for precision in precisions), penalty, hyp_len, ref_len)


def _words(line: str, lowercase: bool) -> List[bytes]:
    # The script reads bytes: only ASCII white space separates words (a no-break space does not) and
    # only ASCII letters are lowered. Python's bytes.split and bytes.lower do just that.
    data = line.encode("utf-8")
    return (data.lower() if lowercase else data).split()


def _ngrams(words: List[bytes], order: int) -> Counter:
    return Counter(zip(*(words[start:] for start in range(order))))
