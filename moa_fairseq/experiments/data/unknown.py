"""The share of <unk> in binarised text. A large share is an error if the pieces were learnt on that text."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import LABEL, subset_stems

WARNED = 0.001  # a larger share of <unk> is worth a warning
REFUSED = 0.05  # a larger share of <unk> in the training text is an error
_READ_AT_ONCE = 50_000_000  # symbols
log = logging.getLogger(__name__)


class Symbols(NamedTuple):
    """The symbols of a binarised file, without sentence ends.

    Args:
        symbols: number of symbols.
        unknown: number of <unk>.
        longest: number of symbols of the longest sentence.
    """

    symbols: int
    unknown: int
    longest: int

    @property
    def share(self) -> float:
        """The share of <unk>."""
        return self.unknown / max(1, self.symbols)


def count_symbols(
    folder: Path, languages: tuple[str, ...], splits: Iterable[str]
) -> dict[str, Symbols]:
    """Count the symbols of binarised text.

    Args:
        folder: the folder made by fairseq-preprocess.
        languages: source and target; () for data in one language.
        splits: the names of the splits.

    Returns:
        Split, such as "train", or for two languages split and language, such as "train.de" → its symbols.
    """
    counts = {}
    for split in splits:
        for side, stem in subset_stems(folder, languages, split).items():
            if side != LABEL:
                counts[f"{split}.{side}" if languages else split] = _count(stem)
    return counts


def _count(stem: Path) -> Symbols:
    """Count the symbols of one binarised file."""
    dataset = MMapIndexedDataset(str(stem))
    sizes = numpy.array(dataset.sizes)  # a copy: their memory map closes with the data set
    total = int(sizes.sum(dtype=numpy.int64))
    # Bytes of a symbol
    width = Path(f"{stem}.bin").stat().st_size // total
    symbols = numpy.memmap(f"{stem}.bin", dtype=f"<u{width}", mode="r")
    unk = Dictionary().unk()
    unknown = 0
    for start in range(0, total, _READ_AT_ONCE):
        unknown += int(numpy.count_nonzero(symbols[start : start + _READ_AT_ONCE] == unk))
    return Symbols(total - len(sizes), unknown, int(sizes.max()) - 1)


def check_unknown(
    counts: Mapping[str, Symbols], text: Path, learnt: bool, allowed: bool, remedy: str
) -> None:
    """Log the shares of <unk>; warn or raise if they are large and the pieces were learnt on this text.

    Args:
        counts: see `count_symbols`.
        text: the folder of the text in pieces, for the error.
        learnt: True if the pieces were learnt here. In a published text, and with a vocabulary of words, any
            share of <unk> is accepted.
        allowed: True if the user accepts any share.
        remedy: a sentence of the error.

    Raises:
        UserError: if the share in the training text is above REFUSED.
    """
    shares = {name: counted.share for name, counted in counts.items()}
    listed_shares = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
    log.info(f"<unk> of the symbols: {listed_shares}")
    if not learnt:
        return
    for name, share in shares.items():
        is_train = name.partition(".")[0] == "train"
        problem = f"{text / name}: {share:.2%} of the symbols are <unk>"
        if is_train and share > REFUSED and not allowed:
            raise UserError(
                f"{problem}. {remedy} To accept it: --allow-unknown (data.allow_unknown: true)."
            )
        if is_train and share > WARNED:
            log.warning(f"{problem}. {remedy}")
        elif share > WARNED:
            log.warning(f"{problem}, because the training text has no such pieces")
