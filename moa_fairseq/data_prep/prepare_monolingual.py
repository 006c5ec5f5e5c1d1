"""From a data set of one language to a binarised folder: obtain → text → fairseq-preprocess --only-source."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping

from moa_fairseq.data_prep.binarised import check_monolingual, check_place, monolingual_flags
from moa_fairseq.data_prep.catalogue import Dataset
from moa_fairseq.data_prep.manifest import write_manifest
from moa_fairseq.data_prep.monolingual import (
    MODEL,
    train_pieces,
    write_bytes,
    write_lines,
    write_pieces,
)
from moa_fairseq.data_prep.obtain import Store
from moa_fairseq.data_prep.parallel_text import Piece
from moa_fairseq.data_prep.prepare import Prepared, Say
from moa_fairseq.data_prep.stage_folder import FileMemory, build_folder, fingerprint_of
from moa_fairseq.data_prep.terms import before_download
from moa_fairseq.data_prep.workers import default_workers


@dataclasses.dataclass(frozen=True)
class MonolingualPreparation:
    """One data set of a language model, ready to be prepared; see Preparation for the arguments."""

    dataset: Dataset
    store: Store
    root: Path
    preprocess: Callable[[Mapping[str, Any]], None]
    say: Say = print
    workers: int = dataclasses.field(default_factory=default_workers)

    def run(self) -> Prepared:
        """Carry out every stage that is not done yet. Raises UserError for unusable data."""
        check_place(self.root)
        parts = self.dataset.parts()
        announce = functools.partial(before_download, self.dataset, self.root, self.store.downloads, self.say)
        pieces = dict(zip(parts, self.store.pieces(parts, before=announce)))
        texts = {split: [pieces[part] for part in parts] for split, parts in self.dataset.splits.items()}
        mark = self._text(texts)
        prepared = Prepared(self.root / "text", {}, mark)
        if self.dataset.encoder != "none":
            prepared = self._binarise(mark)
        self._write_manifest(texts)
        return prepared

    def _text(self, texts: Dict[str, List[Piece]]) -> str:
        dataset, memory = self.dataset, FileMemory(self.root / "files.json")
        digests = {split: [memory.sha256(piece.path) for piece in pieces] for split, pieces in texts.items()}
        mark = fingerprint_of("monolingual", 1, dataset.encoder, digests, dict(dataset.byte_splits))
        if dataset.encoder == "sentencepiece":
            mark = fingerprint_of(mark, dataset.pieces)
            self._learn_pieces(texts["train"], mark)

        def build(new: Path) -> Dict[str, Any]:
            if dataset.encoder == "bytes":
                return write_bytes(texts, dataset.byte_splits, new)
            if dataset.encoder == "sentencepiece":
                return write_pieces(texts, self.root / "model" / MODEL, new, self.workers)
            return write_lines(texts, new)

        for split, fact in build_folder(self.root / "text", mark, build, self.say).items():
            self.say(f"{split}: " + ", ".join(f"{number:,} {what}" for what, number in fact.items()))
        return mark

    def _learn_pieces(self, train: List[Piece], mark: str) -> None:
        count = self.dataset.pieces

        def build(new: Path) -> Dict[str, int]:
            self.say(f"learning {count:,} SentencePiece pieces")
            return train_pieces(train, count, new)

        build_folder(self.root / "model", mark, build, self.say)

    def _binarise(self, text_mark: str) -> Prepared:
        splits = self.dataset.subsets
        mark = fingerprint_of("binarised", 2, dict(self.dataset.preprocess), text_mark)

        def build(new: Path) -> Dict[str, int]:
            values = monolingual_flags(self.root / "text", new, splits, self.workers)
            self.preprocess({**values, **self.dataset.preprocess})
            return check_monolingual(new, splits)

        lines = build_folder(self.root / "binarised", mark, build, self.say)
        return Prepared(self.root / "binarised", lines, mark)

    def _write_manifest(self, texts: Dict[str, List[Piece]]) -> None:
        memory = FileMemory(self.root / "files.json")
        read = {
            split: [{"file": piece.path.name, "sha256": memory.sha256(piece.path)} for piece in pieces]
            for split, pieces in texts.items()
        }
        write_manifest(self.root, {"recipe": self.dataset.name}, self.store.origins, read, self.dataset)
