"""The text processing that papers apply before BLEU: each chain of steps has a name."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.text_marks import RUNNING, TOKENISED
from moa_fairseq.text.languages import language_of, writes_no_spaces
from moa_fairseq.text.steps import detokenize, replace_unicode_punctuation, tokenize

_HYPHEN = re.compile(rb"(\S)-(\S)")


class Chain(NamedTuple):
    """What is done to a line before multi-bleu counts its n-grams.

    Args:
        key: the name of the score in JSON.
        hypothesis: a function from a line of a hypothesis to the line that is counted.
        reference: the same for a line of a reference.
        description: the steps in words.
        wants: the forms that the hypotheses and the references must have, each TOKENISED or RUNNING.
    """

    key: str
    hypothesis: Callable[[str], str]
    reference: Callable[[str], str]
    description: str
    wants: tuple[str, str] = (TOKENISED, TOKENISED)


def split_compounds(line: str) -> str:
    """`perl -ple 's{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g'`: a-b-c becomes `a ##AT##-##AT## b-c`.

    Matches do not overlap, and work on bytes as in Perl: a no-break space is not a space.
    """
    return _HYPHEN.sub(rb"\1 ##AT##-##AT## \2", line.encode()).decode()


def _moa_release(line: str) -> str:
    """Punctuation replaced and hyphens split, as test.sh of MoA's release does on both sides."""
    return split_compounds(replace_unicode_punctuation(line))


CHAINS: dict[str, Chain] = {
    "multi-bleu": Chain("multi_bleu", str, str, "Moses' multi-bleu.perl on the tokens as given"),
    "compound-split": Chain(
        "compound_split_bleu",
        split_compounds,
        split_compounds,
        "hyphens split as by fairseq's compound_split_bleu.sh, multi-bleu (inflated)",
    ),
    "get-ende-bleu": Chain(
        "get_ende_bleu",
        lambda line: split_compounds(tokenize(replace_unicode_punctuation(line), "de")),
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
# Name of a chain → name of its score in JSON
KEYS = {name: chain.key for name, chain in CHAINS.items()} | {SACREBLEU: SACREBLEU}
TOKENIZERS = tuple(name for name in BLEU.TOKENIZERS if name != "spm")  # an old name of flores101


class Texts(NamedTuple):
    """The texts that are scored.

    Args:
        hypotheses: a line for each sentence.
        references: for each reference, a line for each sentence.
        lang: the language of the texts, for Moses' detokenizer and sacreBLEU's tokeniser.
        detokenized: whether the texts are already running text.
        raw_references: references as running text, which sacreBLEU takes in place of detokenised ones.
        tokenizer: the tokeniser of sacreBLEU, one of TOKENIZERS (None: the one for the language).
    """

    hypotheses: list[str]
    references: list[list[str]]
    lang: str = "de"
    detokenized: bool = False
    raw_references: list[list[str]] | None = None
    tokenizer: str | None = None


def score(chain: str, texts: Texts, lowercase: bool = False) -> dict[str, Any]:
    """BLEU by one chain.

    Args:
        chain: a key of CHAINS, or SACREBLEU.
        texts: the texts that are scored.
        lowercase: whether the texts are lower-cased; sacreBLEU ignores this.

    Returns:
        The keys of `multi_bleu`, and `chain`, the steps in words; for sacreBLEU also its signature.

    Raises:
        UserError: in the cases of `multi_bleu` and `running_text`.
    """
    if chain == SACREBLEU:
        return _sacrebleu(running_text(texts))
    steps = CHAINS[chain]
    hypotheses = list(map(steps.hypothesis, texts.hypotheses))
    references = [list(map(steps.reference, lines)) for lines in texts.references]
    scores = multi_bleu(hypotheses, references, lowercase)
    return scores | {"chain": f"{steps.description}, {_case(lowercase)}"}


def _sacrebleu(text: "RunningText") -> dict[str, Any]:
    metric = text.bleu()
    result = metric.corpus_score(text.hypotheses, text.references)
    signature = str(metric.get_signature())
    return _plain(result) | {"signature": signature, "line": str(result), "chain": text.chain}


def _case(lowercase: bool) -> str:
    return "lower-cased" if lowercase else "cased"


def multi_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], lowercase: bool = False
) -> dict[str, object]:
    """BLEU-4 as Moses' `multi-bleu.perl` counts it, and the `line` that the script would print.

    It differs where the script misleads: unequal numbers of lines are an error (the script ignores missing
    hypotheses), an all-empty output scores 0 (the script divides by zero), and the last line counts in full
    even without a line end (the script drops a character).

    Args:
        hypotheses: a tokenised line for each sentence.
        references: for each reference, a tokenised line for each sentence.
        lowercase: the script's -lc, which lower-cases ASCII letters only.

    Returns:
        A dictionary with score and precisions in per cent, bp, hyp_len and ref_len in tokens, and line.

    Raises:
        UserError: for unequal numbers of lines.
    """
    for number, reference in enumerate(references, 1):
        if len(reference) != len(hypotheses):
            raise UserError(
                f"{len(hypotheses)} hypotheses but {len(reference)} lines in reference {number}: BLEU needs "
                f"the same number of lines. Check that both stem from the same test set and are complete."
            )
    words = functools.partial(_words_in_hex, lowercase=lowercase)
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    reference_words = [list(map(words, lines)) for lines in references]
    result = metric.corpus_score(list(map(words, hypotheses)), reference_words)
    if not result.ref_len:
        line = "BLEU = 0, 0/0/0/0 (BP=0, ratio=0, hyp_len=0, ref_len=0)"
        return _plain(result) | {"score": 0.0, "bp": 0.0, "line": line}
    precisions = []
    for matches, total in zip(result.counts, result.totals):
        # Perl divides first, which changes the rounding
        precisions.append(f"{100 * (matches / max(total, 1)):.1f}")
    orders = "/".join(precisions)
    lengths = f"ratio={result.ratio:.3f}, hyp_len={result.sys_len}, ref_len={result.ref_len}"
    line = f"BLEU = {result.score:.2f}, {orders} (BP={result.bp:.3f}, {lengths})"
    return _plain(result) | {"line": line}


def _words_in_hex(line: str, lowercase: bool) -> str:
    """The words of a line as multi-bleu.perl separates them, which sacreBLEU cannot split any further.

    The script reads bytes: only ASCII white space separates words, and only ASCII letters are lowered.
    """
    data = line.encode()
    if lowercase:
        data = data.lower()
    return " ".join(word.hex() for word in data.split())


def _plain(result: Any) -> dict[str, object]:
    """sacreBLEU's score as plain data, not rounded."""
    return {
        "score": result.score,
        "precisions": result.precisions,
        "bp": result.bp,
        "hyp_len": result.sys_len,
        "ref_len": result.ref_len,
    }


@functools.cache
def tokenizer_for(lang: str, requested: str | None = None) -> str:
    """The tokeniser that sacreBLEU has for a language; char for other languages without spaces.

    Args:
        lang: the code of the language.
        requested: one of TOKENIZERS, which is used for any language.

    Raises:
        UserError: if sacreBLEU cannot load the tokeniser.
    """
    lang = language_of(lang)
    default = "char" if writes_no_spaces(lang) else BLEU.TOKENIZER_DEFAULT
    name = requested or BLEU._TOKENIZER_MAP.get(lang, default)
    try:
        BLEU(tokenize=name)
    except (Exception, SystemExit) as error:  # a missing package, model or network
        reason = " ".join(str(error).split())
        raise UserError(
            f"sacreBLEU cannot load its tokeniser {name}: {reason}. Install what it needs, or name another "
            "one (--sacrebleu-tokenizer; in a recipe score.flags.sacrebleu-tokenizer)."
        ) from error
    return name


class RunningText(NamedTuple):
    """The texts and the settings that sacreBLEU is given.

    Args:
        hypotheses, references: as in `Texts`.
        tokenizer: the tokeniser of sacreBLEU.
        lowercase: whether both sides are lower-cased.
        chain: the processing of the texts in words.
    """

    hypotheses: list[str]
    references: list[list[str]]
    tokenizer: str
    lowercase: bool
    chain: str

    def bleu(self) -> BLEU:
        """The metric for these texts."""
        return BLEU(lowercase=self.lowercase, tokenize=self.tokenizer, force=True)


def running_text(texts: Texts) -> RunningText:
    """Texts for sacreBLEU; Moses' detokenizer makes running text from tokens.

    Case counts, unless both sides are in lower case. Lower-cased tokens are scored as tokens
    (`case:lc|tok:none`) unless a tokeniser is named, because the detokenizer cannot restore the running text
    that other systems are scored on.

    Args:
        texts: the hypotheses and references.

    Raises:
        UserError: for a tokeniser that cannot be loaded.
    """
    tokenizer = tokenizer_for(texts.lang, texts.tokenizer)
    hypotheses = texts.hypotheses
    references = texts.raw_references or texts.references
    has_running_references = texts.detokenized or texts.raw_references is not None
    lowercase = _is_lower_cased(hypotheses, references, texts.lang)
    if lowercase and not has_running_references and not texts.tokenizer:
        chain = "sacreBLEU on the tokens as given, lower-cased"
        return RunningText(hypotheses, references, "none", lowercase, chain)
    to_text = functools.partial(detokenize, lang=texts.lang)
    if not texts.detokenized:
        hypotheses = list(map(to_text, hypotheses))
    if not has_running_references:
        references = [list(map(to_text, lines)) for lines in references]
    detokenizer = f"Moses detokenizer -l {texts.lang}"
    hypotheses_form = "as given" if texts.detokenized else detokenizer
    references_form = "as given" if has_running_references else detokenizer
    chain = f"sacreBLEU {tokenizer}, {_case(lowercase)}; hypotheses/references: "
    chain += f"{hypotheses_form}/{references_form}"
    return RunningText(hypotheses, references, tokenizer, lowercase, chain)


def _is_lower_cased(hypotheses: list[str], references: list[list[str]], lang: str) -> bool:
    """Whether both sides are lower-cased.

    A script without case may have a few Latin letters, which do not show that the text was lower-cased.
    """
    if writes_no_spaces(lang):
        return False
    text = "\n".join(hypotheses)
    if text != text.lower():
        return False
    return all("\n".join(lines).islower() for lines in references)
