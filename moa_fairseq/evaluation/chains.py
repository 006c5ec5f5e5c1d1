"""The text processing that papers apply before BLEU: each chain of steps has a name."""

import re
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

from moa_fairseq.evaluation.bleu import corpus_bleu
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


def _as_given(line: str) -> str:
    return line


def _ende_hypothesis(line: str) -> str:
    return split_compounds(tokenize(replace_unicode_punctuation(line), "de"))


def _moa_release(line: str) -> str:
    return split_compounds(replace_unicode_punctuation(line))


CHAINS: Dict[str, Chain] = {
    "multi-bleu": Chain("multi_bleu", _as_given, _as_given, "Moses' multi-bleu.perl on the tokens as given"),
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
    """BLEU after the chain `name` of CHAINS.

    hypotheses: lines. references: one sequence of lines per reference. Returns score, precisions, bp,
    hyp_len, ref_len, the `line` multi-bleu.perl would print, and the `chain` in words.
    """
    chain = CHAINS[name]
    result = corpus_bleu(
        [chain.hypothesis(line) for line in hypotheses],
        [[chain.reference(line) for line in reference] for reference in references],
        lowercase,
    )
    case = "lower-cased" if lowercase else "cased"
    return {**result.as_dict(), "line": str(result), "chain": f"{chain.description}, {case}"}


def sacrebleu_chain(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], lang: str, detokenized: Sequence[bool]
) -> Dict[str, object]:
    """sacreBLEU of running text (13a, cased), with its signature.

    detokenized: whether the hypotheses, and whether the references, are running text already; else
    Moses' detokenizer for `lang` makes them so. Lower-cased tokens stay tokens (`case:lc|tok:none`): the
    running text that others are scored on does not come back.
    """
    from sacrebleu.metrics import BLEU

    lowercase = all("\n".join(lines).islower() for lines in references)
    lowercase = lowercase and not any(line != line.lower() for line in hypotheses)
    as_tokens = lowercase and not any(detokenized)

    def running(lines: Sequence[str], already: bool) -> List[str]:
        return list(lines) if already or as_tokens else [detokenize(line, lang) for line in lines]

    metric = BLEU(lowercase=lowercase, tokenize="none" if as_tokens else "13a", force=True)
    result = metric.corpus_score(
        running(hypotheses, detokenized[0]), [running(reference, detokenized[1]) for reference in references]
    )
    done = "/".join("as given" if already else f"Moses detokenizer -l {lang}" for already in detokenized)
    done = f"13a, {'lower-cased' if lowercase else 'cased'}; hypotheses/references: {done}"
    return {
        "score": result.score,
        "precisions": list(result.precisions),
        "bp": result.bp,
        "hyp_len": result.sys_len,
        "ref_len": result.ref_len,
        "signature": str(metric.get_signature()),
        "line": str(result),
        "chain": f"sacreBLEU {'on the tokens as given, lower-cased' if as_tokens else done}",
    }
