"""From a data set to a binarised folder: the steps of each type of data."""

import dataclasses
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import (
    DICTIONARY,
    INPUT,
    LABEL,
    Prepared,
    check_binarised,
    check_place,
    is_binarised,
    is_classification,
)
from moa_fairseq.experiments.data.catalogue import (
    CLASSIFICATION,
    LANGUAGE_MODELING,
    MASKED_LM,
    SUBWORD_NMT,
    TRANSLATION,
    datasets,
)
from moa_fairseq.experiments.data.job import PreparationJob
from moa_fairseq.experiments.data.language_model_steps import (
    LanguageModelPreparation,
    MaskedLMPreparation,
)
from moa_fairseq.experiments.data.listops import DIGITS, GROUPS, SYMBOLS, ListOps, write_split
from moa_fairseq.experiments.data.translation_steps import TranslationPreparation
from moa_fairseq.experiments.make import Step, fingerprint_of, make, read_step_records
from moa_fairseq.experiments.records.json_files import Values, selected
from moa_fairseq.experiments.records.provenance import tool_versions
from moa_fairseq.files import atomic_write, checksum

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Preparation(PreparationJob):
    """One data section of a recipe, ready to run."""

    def run(self) -> Prepared:
        """Run all steps whose outputs are missing. Raises UserError for unusable data."""
        check_place(self.root)
        if self.source and (self.settings["recipe"] == "binarised" or is_binarised(self.source)):
            return self._checked(self.source)
        # If two runs prepare one data set at the same time, the second waits and finds everything done.
        conditions = {"tools": tool_versions()}
        make(
            [dataclasses.replace(step, conditions=conditions) for step in self.steps()],
            self.root,
            executor=self.executor,
            patience=math.inf,
            commands=self.commands,
            whole=self.whole,
        )
        records = read_step_records(self.root)
        record = records.get("binarised") or records.get(f"binarised-{LABEL}")
        if not record:  # plain text, which fairseq does not read
            return Prepared(self.root / "text", {}, records["text"]["fingerprint"])
        return Prepared(self.root / "binarised", record["facts"], record["fingerprint"])

    def _checked(self, source: Path) -> Prepared:
        """The user's binarised folder, which is used without changes."""
        check_place(source)
        dataset = datasets().get(self.settings["recipe"])
        if dataset and is_classification(source) != (dataset.kind == CLASSIFICATION):
            kind = f"another type of model than data.recipe {dataset.name}"
            remedy = "Give the folder of that data set, or leave --data out"
            raise UserError(f"--data {source} was binarised for {kind}. {remedy}.")
        log.info(f"{source} is already binarised: used without changes")
        sentences = check_binarised(source, self.languages, self.subsets, self.joined)
        return Prepared(source, sentences, content_digest(source))

    def steps(self) -> list[Step]:
        """All steps, in order. Only the names of the source's files are read."""
        unknown = ", ".join(subset for subset in self.subsets if subset not in self.data.subsets)
        if unknown:
            raise UserError(
                f"The data has no subset {unknown} (generate.subsets, score.subsets); {self.data.name} has "
                f"{', '.join(self.data.subsets)}."
            )
        return _PREPARATIONS[self.data.kind](self).steps()


@dataclasses.dataclass
class ClassificationPreparation:
    """The steps of generated sentences: text → binarised sentences, classes and groups.

    Args:
        job: the data section of the recipe, and the files of the data set.
    """

    job: PreparationJob

    def steps(self) -> list[Step]:
        """All steps in their order, the manifest included."""
        job = self.job
        settings = job.data.generated
        text = Step("text", job.root / "text", self.generate, {"listops": settings})
        both = [job.binarise(text, job.data.subsets, name) for name in (INPUT, LABEL)]
        folder = job.root / "binarised" / GROUPS
        groups = Step(f"binarised-{GROUPS}", folder, self.copy_groups, {"text": text})
        return [text, *both, groups, job.manifest(both[-1], generated=settings)]

    def generate(self, new: Path) -> Values:
        """Write the expressions of each split, and both dictionaries."""
        settings = self.job.data.generated
        total = sum(settings["sizes"].values())
        log.info(f"generating {total:,} expressions with seed {settings['seed']}")
        for name, symbols in ((INPUT, SYMBOLS), (LABEL, DIGITS)):
            with atomic_write(new / name / DICTIONARY) as stream:
                stream.writelines(f"{symbol} 1\n" for symbol in symbols)
        samples = ListOps(**settings).splits(self.job.workers)
        facts = {}
        for split, expressions in samples.items():
            counts = write_split(new, split, expressions)
            log.info(f"{split}: {counts['lines']:,} expressions, {counts['tokens']:,} tokens")
            facts[split] = counts
        return facts

    def copy_groups(self, new: Path) -> None:
        """Copy the groups of the expressions next to the binarised files."""
        shutil.copytree(self.job.root / "text" / GROUPS, new)


_PREPARATIONS: dict[str, Callable[[PreparationJob], Any]] = {
    TRANSLATION: TranslationPreparation,
    LANGUAGE_MODELING: LanguageModelPreparation,
    MASKED_LM: MaskedLMPreparation,
    CLASSIFICATION: ClassificationPreparation,
}


def content_digest(source: Path) -> str:
    """A digest of a binarised folder's content, which is the same for equal data in any folder."""
    return fingerprint_of({path.name: checksum(path) for path in _binarised_files(source)})


def size_digest(source: Path) -> str:
    """A digest of the file sizes alone, by which 0.1.0 identified a given binarised folder."""
    sizes = {path.name: path.stat().st_size for path in _binarised_files(source)}
    return fingerprint_of("given", sizes)


def _binarised_files(source: Path) -> list[Path]:
    """The files that a digest covers."""
    folder = source / INPUT if is_classification(source) else source
    suffixes = (".bin", ".idx", ".txt")
    return [path for path in folder.glob("*.*") if path.suffix in suffixes and path.is_file()]


# Keys of a data section that older versions did not have, with the values that give the older versions' data.
LATER: Values = {
    "segmentation": SUBWORD_NMT,
    "piece_model": "unigram",
    "byte_fallback": True,
    "character_coverage": None,
    "allow_unknown": False,
}


def prepared_folder(settings: Mapping[str, Any], source: Path | None, parent: Path) -> Path:
    """The folder for the stages of a data section: another folder for other settings or another source."""
    origin = str(source.resolve()) if source else ""
    name = "_".join(filter(None, selected(settings, ("recipe", "source", "target")).values()))
    recorded = {
        key: value for key, value in settings.items() if key not in LATER or value != LATER[key]
    }
    recorded.pop("allow_unknown", None)  # a key that does not change the data
    if not recorded.get("tokens"):
        recorded.pop("tokens", None)
    return parent / f"{name}-{fingerprint_of(recorded, origin)[:8]}"
