"""From a data set to a binarised folder, stage by stage, each kept once it is whole."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from moa_fairseq.data_prep import one_language
from moa_fairseq.data_prep.binarised import (
    INPUT,
    Prepared,
    check_binarised,
    check_place,
    is_binarised,
    is_classification,
    preprocess_calls,
)
from moa_fairseq.data_prep.catalogue import (
    CLASSIFICATION,
    LANGUAGE_MODELING,
    MASKED_LM,
    TRANSLATION,
    Dataset,
    datasets,
)
from moa_fairseq.data_prep.obtain import Store
from moa_fairseq.data_prep.parallel_text import find_file
from moa_fairseq.data_prep.stage_folder import FileMemory, build_folder, fingerprint_of
from moa_fairseq.data_prep.translation import translation
from moa_fairseq.errors import UserError
from moa_fairseq.text.workers import default_workers

KINDS = {
    TRANSLATION: translation,
    LANGUAGE_MODELING: one_language.language_modeling,
    MASKED_LM: one_language.masked_lm,
    CLASSIFICATION: one_language.classification,
}
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Preparation:
    """One data section of a recipe, ready to be carried out.

    settings: the recipe's `data` section as a mapping. subsets: those that training and scoring
    need. source: the --data folder (or .zip of running text), or None for a data set that is downloaded or
    drawn. root: where the stages are kept. preprocess: runs fairseq-preprocess with the given flags and
    raises when it fails. downloads: where public files are kept (beside `root` unless given). dataset: in
    place of the table's row.
    """

    settings: Mapping[str, Any]
    subsets: Sequence[str]
    source: Optional[Path]
    root: Path
    preprocess: Callable[[Mapping[str, Any]], None]
    downloads: Optional[Path] = None
    offline: bool = False
    workers: int = dataclasses.field(default_factory=default_workers)
    dataset: Optional[Dataset] = None

    def run(self) -> Prepared:
        """Carry out every stage that is not done yet. Raises UserError for unusable data."""
        check_place(self.root)
        if self.source and (self.settings["recipe"] == "binarised" or is_binarised(self.source)):
            check_place(self.source)
            dataset = datasets().get(self.settings["recipe"])
            if dataset and is_classification(self.source) != (dataset.kind == CLASSIFICATION):
                raise UserError(
                    f"--data {self.source} was binarised for another kind of model than data recipe "
                    f"{dataset.name} is for: name the folder of that data set, or leave --data away."
                )
            log.info(f"{self.source}: binarised already; used as it is")
            sentences = check_binarised(self.source, self.languages, self.subsets, self._joined)
            # File sizes tell apart two preparations; reading gigabytes to be sure is not worth the wait.
            place = self.source / INPUT if is_classification(self.source) else self.source
            files = [path for path in sorted(place.glob("*.*")) if path.suffix in (".bin", ".idx", ".txt")]
            sizes = {path.name: path.stat().st_size for path in files if path.is_file()}
            return Prepared(self.source, sentences, fingerprint_of("given", sizes))
        dataset = self.dataset or datasets()[self.settings["recipe"]]
        own = [f"train.{language}" for language in self.languages] if dataset.archives else []
        if own and all(find_file(self.source, name) for name in own):
            what = " and ".join(own)
            log.info(f"{self.source} holds {what}: taken as tokenised and cleaned; what is left is BPE")
            dataset = datasets()["parallel"]
        unknown = ", ".join(subset for subset in self.subsets if subset not in dataset.subsets)
        if unknown:
            raise UserError(
                f"The data has no subset {unknown} (generate.subsets, score.subsets); {dataset.name} has "
                f"{', '.join(dataset.subsets)}."
            )
        store = Store(self.source, self.downloads or self.root.parent / "downloads", self.offline)
        return KINDS[dataset.kind](self, dataset, store)

    @property
    def languages(self) -> Tuple[str, ...]:
        """(source, target), or () for data of one language."""
        return tuple(self.settings[side] for side in ("source", "target") if self.settings.get(side))

    @property
    def _joined(self) -> bool:
        return bool(self.languages) and self.settings["joined_dictionary"]

    def memory(self) -> FileMemory:
        """What is known of the files that were read."""
        return FileMemory(self.root / "files.json")

    def stage(self, name: str, mark: str, build: Callable[[Path], Any], resumable: bool = False) -> Any:
        """build_folder for one stage."""
        return build_folder(self.root / name, mark, build, resumable)

    def binarise(
        self,
        dataset: Dataset,
        splits: Sequence[str],
        mark: str,
        finish: Callable[[Path], Any] = lambda folder: None,
    ) -> Prepared:
        """The last stage of all kinds. finish: puts what else belongs there into the new folder."""

        def build(new: Path) -> Dict[str, int]:
            for flags in preprocess_calls(self.settings, dataset, self.root, new, splits, self.workers):
                self.preprocess(flags)
            finish(new)
            return check_binarised(new, self.languages, splits, self._joined)

        return Prepared(self.root / "binarised", self.stage("binarised", mark, build), mark)


def prepared_folder(settings: Mapping[str, Any], source: Optional[Path], parent: Path) -> Path:
    """Where the stages of a data section are kept: another folder for other settings or another source."""
    place = str(source.resolve()) if source else ""
    name = "_".join(settings[key] for key in ("recipe", "source", "target") if settings[key])
    return parent / f"{name}-{fingerprint_of(dict(settings), place)[:8]}"
