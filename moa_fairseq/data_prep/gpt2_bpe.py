"""Text → ids of GPT-2's byte-pair encoding, over several processes."""

from __future__ import annotations

import collections
import functools
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from fairseq.data.encoders.gpt2_bpe_utils import Encoder, get_encoder

from moa_fairseq.data_prep.gpt2_files import Gpt2Files
from moa_fairseq.data_prep.parallel_text import read_lines
from moa_fairseq.text.workers import chunks, ordered_map

CHUNK = 10_000
# Words of WikiText's tokenisation that are no words of the language; they are encoded like any other.
MARKS = {"unk": "<unk>", "hyphen": "@-@"}
_load_encoder = functools.lru_cache(maxsize=1)(get_encoder)


def encode_line(line: str, encoder: Encoder) -> str:
    """One line as ids separated by spaces; white space at its ends is dropped, an empty line stays empty.

    RoBERTa's own preparation does so: the first word of a line is encoded without a space before it.
    """
    return " ".join(map(str, encoder.encode(line.strip())))


def encode_texts(
    texts: Mapping[str, Path], folder: Path, files: Gpt2Files, workers: int = 1
) -> Dict[str, Dict[str, Any]]:
    """Encode the text of each split into `folder/<split>`, line by line.

    Returns for each split its file, lines, words (white-space separated, without ends of lines), subwords,
    and unk and hyphen, the number of words `<unk>` and `@-@`.
    """
    work, facts = functools.partial(_encode, encoder=str(files.encoder), vocab=str(files.vocab)), {}
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        counts: collections.Counter[str] = collections.Counter(
            dict.fromkeys(("lines", "words", "subwords", *MARKS), 0)
        )
        with open(folder / split, "w", encoding="utf-8", newline="\n") as stream:
            batches = chunks(read_lines(text), CHUNK)
            for encoded, counted in ordered_map(work, batches, workers, f"GPT-2 BPE, {split}"):
                stream.writelines(line + "\n" for line in encoded)
                counts.update(counted)
        facts[split] = {"file": text.name, **counts}
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
