"""From tokens back to running text: Moses' `detokenizer.perl` as in sacremoses."""

from functools import cache

from sacremoses import MosesDetokenizer


def detokenize(line: str, lang: str) -> str:
    """Join the Moses tokens of a line, separated by spaces, into running text of language `lang`.

    Undoes ` @-@ ` and the entities (&quot; &apos; &amp; &#124; &lt; &gt; &#91; &#93;).
    """
    return _detokenizer(lang).detokenize(line.split())


@cache
def _detokenizer(lang: str) -> MosesDetokenizer:
    return MosesDetokenizer(lang)
