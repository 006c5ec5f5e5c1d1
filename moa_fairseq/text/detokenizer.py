"""From tokens back to running text: Moses' `detokenizer.perl`, by way of sacremoses."""

from functools import cache

from sacremoses import MosesDetokenizer


def detokenize(line: str, lang: str) -> str:
    """Join Moses tokens, given as one line with spaces between, to running text of language `lang`.

    Undoes ` @-@ ` and the entities (&quot; &apos; &amp; &#124; &lt; &gt; &#91; &#93;).
    """
    return _detokenizer(lang).detokenize(line.split())


@cache
def _detokenizer(lang: str) -> MosesDetokenizer:
    return MosesDetokenizer(lang)
