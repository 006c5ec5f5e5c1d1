"""From a generated data set of sentences with classes to the folder that `sentence_prediction` reads."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping

from moa_fairseq.data_prep.binarised import (
    INPUT,
    LABEL,
    check_classification,
    check_place,
    classification_flags,
)
from moa_fairseq.data_prep.catalogue import Dataset
from moa_fairseq.data_prep.listops import DIGITS, SYMBOLS, Expression, ListOps
from moa_fairseq.data_prep.manifest import write_manifest
from moa_fairseq.data_prep.prepare import Prepared, Say
from moa_fairseq.data_prep.stage_folder import build_folder, fingerprint_of
from moa_fairseq.data_prep.workers import default_workers
from moa_fairseq.files import atomic_write

# Beside them: a line for each sentence, a column for each thing by which scores are told apart.
GROUPS = "groups"
_GROUPS = ("dependency", "depth", "length")


@dataclasses.dataclass(frozen=True)
class ClassificationPreparation:
    """One generated data set, ready to be made; see Preparation for the arguments."""

    dataset: Dataset
    root: Path
    preprocess: Callable[[Mapping[str, Any]], None]
    say: Say = print
    workers: int = dataclasses.field(default_factory=default_workers)

    def run(self) -> Prepared:
        """Carry out every stage that is not done yet. Raises UserError for impossible sizes."""
        check_place(self.root)
        settings = dict(self.dataset.generated)
        text_mark = fingerprint_of("listops", 1, settings)

        def generate(new: Path) -> Dict[str, Any]:
            self.say(f"drawing {sum(settings['sizes'].values()):,} expressions by seed {settings['seed']}")
            splits = ListOps(**settings).splits(self.workers)
            for name, symbols in ((INPUT, SYMBOLS), (LABEL, DIGITS)):
                _write(new / name / "dict.txt", [f"{symbol} 1" for symbol in symbols])
            return {split: _write_split(new, split, found) for split, found in splits.items()}

        facts = build_folder(self.root / "text", text_mark, generate, self.say)
        for split, fact in facts.items():
            self.say(f"{split}: {fact['lines']:,} expressions, {fact['tokens']:,} tokens")
        mark = fingerprint_of("binarised", 1, text_mark)
        lines = build_folder(self.root / "binarised", mark, self._binarise, self.say)
        asked = {"recipe": self.dataset.name, "generated": settings}
        write_manifest(self.root, asked, {}, {}, self.dataset)
        return Prepared(self.root / "binarised", lines, mark)

    def _binarise(self, new: Path) -> Dict[str, int]:
        splits = self.dataset.subsets
        for name in (INPUT, LABEL):
            self.preprocess(classification_flags(self.root / "text", new, name, splits))
        shutil.copytree(self.root / "text" / GROUPS, new / GROUPS)
        return check_classification(new, splits)


def _write_split(folder: Path, split: str, expressions: List[Expression]) -> Dict[str, int]:
    _write(folder / INPUT / split, [expression.tokens for expression in expressions])
    _write(folder / LABEL / split, [str(expression.value) for expression in expressions])
    rows = [[str(getattr(expression, group)) for group in _GROUPS] for expression in expressions]
    _write(folder / GROUPS / f"{split}.tsv", ["\t".join(row) for row in [_GROUPS, *rows]])
    tokens = sum(len(expression.tokens.split()) for expression in expressions)
    return {"lines": len(expressions), "tokens": tokens}


def _write(path: Path, lines: List[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as stream:
        stream.writelines(line + "\n" for line in lines)
