"""Text → ids of GPT-2's byte-pair encoding, over several processes; an interruption costs one chunk."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from fairseq.data.encoders.gpt2_bpe_utils import Encoder, get_encoder

from moa_fairseq.data_prep.gpt2_files import Gpt2Files
from moa_fairseq.data_prep.parallel_text import read_lines
from moa_fairseq.data_prep.resumable_files import resumable_files
from moa_fairseq.text.workers import chunks, ordered_map

CHUNK = 10_000
# Words of WikiText's tokenisation that are no words of the language; they are encoded like any other.
MARKS = {"unk": "<unk>", "hyphen": "@-@"}


def encode_line(line: str, encoder: Encoder) -> str:
    """One line as ids separated by spaces; white space at its ends is dropped, an empty line stays empty.

    RoBERTa's own preparation does so: the first word of a line is encoded without a space before it.
    """
    return " ".join(map(str, encoder.encode(line.strip())))


def encode_texts(
    texts: Mapping[str, Path], folder: Path, files: Gpt2Files, workers: int = 1
) -> Dict[str, Dict[str, Any]]:
    """Encode the text of each split into `folder/<split>`, line by line, going on where a call stopped.

    Returns for each split its file, lines, words (white-space separated, without ends of lines), subwords,
    and unk and hyphen, the number of words `<unk>` and `@-@`.
    """
    work = functools.partial(_encode, encoder=str(files.encoder), vocab=str(files.vocab))
    with resumable_files(folder, list(texts)) as (streams, facts, commit):
        for split, text in texts.items():
            zeros = dict.fromkeys(("lines", "words", "subwords", *MARKS), 0)
            fact = facts.setdefault(split, {"file": text.name, **zeros})
            lines = itertools.islice(read_lines(text), fact["lines"], None)
            label = f"GPT-2 BPE, {split}"
            results = ordered_map(work, chunks(lines, CHUNK), workers, label, fact["lines"])
            for encoded, counts in results:
                streams[split].writelines(line + "\n" for line in encoded)
                for name, count in counts.items():
                    fact[name] += count
                commit()
    return facts


def _encode(lines: List[str], encoder: str, vocab: str) -> Tuple[List[str], Dict[str, int]]:
    bpe = _load_encoder(encoder, vocab)
    words = [word for line in lines for word in line.split()]
    encoded = [encode_line(line, bpe) for line in lines]
    return encoded, {
        "lines": len(lines),
        "words": len(words),
        "subwords": sum(len(line.split()) for line in encoded),
        **{name: words.count(mark) for name, mark in MARKS.items()},
    }


@functools.lru_cache(maxsize=1)
def _load_encoder(encoder: str, vocab: str) -> Encoder:
    return get_encoder(encoder, vocab)
