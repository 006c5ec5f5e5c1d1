"""The text processing that papers apply before BLEU: each chain of steps has a name."""

import re
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.text_marks import RUNNING, TOKENISED
from moa_fairseq.text import detokenize, replace_unicode_punctuation, tokenize

_HYPHEN = re.compile(rb"(\S)-(\S)")


class Chain(NamedTuple):
    """What is done to a hypothesis and a reference line before multi-bleu counts n-grams; also in words.

    wants: the form that the hypotheses and the references must have.
    """

    key: str
    hypothesis: Callable[[str], str]
    reference: Callable[[str], str]
    description: str
    wants: Tuple[str, str] = (TOKENISED, TOKENISED)


def split_compounds(line: str) -> str:
    """`perl -ple 's{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g'`: a-b-c becomes `a ##AT##-##AT## b-c`.

    Matches do not overlap, and work on bytes as in Perl: a no-break space is not a space.
    """
    return _HYPHEN.sub(rb"\1 ##AT##-##AT## \2", line.encode("utf-8")).decode("utf-8")


def _ende_hypothesis(line: str) -> str:
    return split_compounds(tokenize(replace_unicode_punctuation(line), "de"))


def _moa_release(line: str) -> str:
    return split_compounds(replace_unicode_punctuation(line))


CHAINS: Dict[str, Chain] = {
    "multi-bleu": Chain("multi_bleu", str, str, "Moses' multi-bleu.perl on the tokens as given"),
    "compound-split": Chain(
        "compound_split_bleu",
        split_compounds,
        split_compounds,
        "hyphens split as by fairseq's compound_split_bleu.sh, multi-bleu (inflated)",
    ),
    "get-ende-bleu": Chain(
        "get_ende_bleu",
        _ende_hypothesis,
        split_compounds,
        "tensor2tensor's get_ende_bleu.sh: punctuation replaced in and Moses tokenizer -l de on the "
        "hypotheses only, hyphens split, multi-bleu (inflated)",
        (RUNNING, TOKENISED),
    ),
    "moa-release": Chain(
        "moa_release_bleu",
        _moa_release,
        _moa_release,
        "test.sh of MoA's release: punctuation replaced, hyphens split even where the tokenizer has already "
        "split them, multi-bleu (doubly inflated; comparable with nothing else)",
    ),
}
SACREBLEU = "sacrebleu"
DEFAULT_CHAINS = ("multi-bleu", "compound-split", SACREBLEU)


def multi_bleu_chain(
    name: str, hypotheses: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool = False
) -> Dict[str, object]:
    """BLEU after the chain `name` of CHAINS: what `multi_bleu` returns, and the `chain` in words."""
    chain = CHAINS[name]
    scores = multi_bleu(
        [chain.hypothesis(line) for line in hypotheses],
        [[chain.reference(line) for line in reference] for reference in references],
        lowercase,
    )
    return {**scores, "chain": f"{chain.description}, {'lower-cased' if lowercase else 'cased'}"}


def multi_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool = False
) -> Dict[str, object]:
    """BLEU-4 in per cent, as Moses' `multi-bleu.perl` counts it, and the `line` that it would print.

    hypotheses: one tokenised line each. references: one sequence of lines per reference. lowercase: its -lc,
    which lowers ASCII letters only. Returns score, precisions, bp, hyp_len, ref_len (tokens) and line.

    It differs where the script misleads: unequal numbers of lines raise UserError (the script ignores missing
    hypotheses), an all-empty output scores 0 (the script divides by zero), and the last line counts in full
    even without a line end (the script drops a character).
    """
    from sacrebleu.metrics import BLEU

    for number, reference in enumerate(references, 1):
        if len(reference) != len(hypotheses):
            raise UserError(
                f"{len(hypotheses)} hypotheses but {len(reference)} lines in reference {number}: BLEU needs "
                f"the same number of lines. Check that both stem from the same test set and are complete."
            )

    def words(line: str) -> str:
        # The script reads bytes: only ASCII white space separates words and only ASCII letters are lowered.
        # sacreBLEU splits at any white space, such as a no-break space, so it is given each word in hex.
        data = line.encode("utf-8")
        return " ".join(word.hex() for word in (data.lower() if lowercase else data).split())

    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    result = metric.corpus_score([*map(words, hypotheses)], [[*map(words, lines)] for lines in references])
    if not result.ref_len:
        line = "BLEU = 0, 0/0/0/0 (BP=0, ratio=0, hyp_len=0, ref_len=0)"
        return {**_plain(result), "score": 0.0, "bp": 0.0, "line": line}
    # rounded as Perl does, which divides first
    precisions = [100 * (matches / max(total, 1)) for matches, total in zip(result.counts, result.totals)]
    orders = "/".join(f"{precision:.1f}" for precision in precisions)
    lengths = f"ratio={result.ratio:.3f}, hyp_len={result.sys_len}, ref_len={result.ref_len}"
    line = f"BLEU = {result.score:.2f}, {orders} (BP={result.bp:.3f}, {lengths})"
    return {**_plain(result), "line": line}


def _plain(result: Any) -> Dict[str, object]:
    """sacreBLEU's score as plain data, unrounded."""
    scores = {name: getattr(result, name) for name in ("score", "precisions", "bp")}
    return {**scores, "hyp_len": result.sys_len, "ref_len": result.ref_len}


class RunningText(NamedTuple):
    """What sacreBLEU is given: hypotheses, references, how it counts, and `chain`, the same in words."""

    hypotheses: List[str]
    references: List[List[str]]
    settings: Dict[str, Any]
    chain: str


def running_text(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], lang: str, detokenized: Sequence[bool]
) -> RunningText:
    """Text for sacreBLEU (13a, cased).

    detokenized: whether the hypotheses, and whether the references, are running text already; else
    Moses' detokenizer for `lang` makes them so. Lower-cased tokens stay tokens (`case:lc|tok:none`): the
    running text that others are scored on does not come back.
    """
    lowercase = all("\n".join(lines).islower() for lines in references)
    lowercase = lowercase and not any(line != line.lower() for line in hypotheses)
    as_tokens = lowercase and not any(detokenized)

    def running(lines: Sequence[str], already: bool) -> List[str]:
        return list(lines) if already or as_tokens else [detokenize(line, lang) for line in lines]

    done = "/".join("as given" if already else f"Moses detokenizer -l {lang}" for already in detokenized)
    done = f"13a, {'lower-cased' if lowercase else 'cased'}; hypotheses/references: {done}"
    return RunningText(
        running(hypotheses, detokenized[0]),
        [running(reference, detokenized[1]) for reference in references],
        {"lowercase": lowercase, "tokenize": "none" if as_tokens else "13a"},
        f"sacreBLEU {'on the tokens as given, lower-cased' if as_tokens else done}",
    )


def sacrebleu_chain(text: RunningText) -> Dict[str, object]:
    """sacreBLEU's BLEU with its signature."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(**text.settings, force=True)
    result = metric.corpus_score(text.hypotheses, text.references)
    signature = str(metric.get_signature())
    return {**_plain(result), "signature": signature, "line": str(result), "chain": text.chain}
