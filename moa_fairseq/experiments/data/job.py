"""The common part of all kinds of data: the files of a data section, binarising and the manifest."""

import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_fairseq.experiments.data.binarised import DICTIONARY, check_binarised, check_stem
from moa_fairseq.experiments.data.catalogue import (
    CLASSIFICATION,
    LANGUAGE_MODELING,
    MASKED_LM,
    SENTENCEPIECE,
    TRANSLATION,
    Dataset,
    Part,
    datasets,
)
from moa_fairseq.experiments.data.manifest import MANIFEST, manifest_of
from moa_fairseq.experiments.data.obtain import MEMORY, Store, known_checksum
from moa_fairseq.experiments.data.parallel_text import TextFile, find_file, read_lines
from moa_fairseq.experiments.data.unknown import Symbols, check_unknown, count_symbols
from moa_fairseq.experiments.make import OUT, Step, read_step_records
from moa_fairseq.experiments.records.json_files import Values, write_json
from moa_fairseq.files import atomic_write
from moa_fairseq.process import Executor, flags

CODES = "codes"
log = logging.getLogger(__name__)


def default_workers() -> int:
    """The number of processors, at most 8."""
    return min(8, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class PreparationJob:
    """One data section of a recipe: its files, and the steps common to all kinds of data.

    Args:
        settings: the recipe's `data` section.
        subsets: the subsets that training and scoring need.
        source: the user's folder (--data, --from); None for a data set that is downloaded or generated.
        root: the folder of the stages.
        executor: runs the commands of the steps.
        downloads: the folder of public files; by default next to `root`.
        offline: never download.
        workers: the number of processes for text.
        dataset: the data set, instead of the one that settings["recipe"] names.
        commands: the file that records the commands; by default in `root`.
        whole: the command line that makes all of the data.
        unread: True if the steps are only shown, so that the source need not exist yet.
    """

    settings: Mapping[str, Any]
    subsets: Sequence[str]
    source: Path | None
    root: Path
    executor: Executor = dataclasses.field(default_factory=Executor)
    downloads: Path | None = None
    offline: bool = False
    workers: int = dataclasses.field(default_factory=default_workers)
    dataset: Dataset | None = None
    commands: Path | None = None
    whole: str = ""
    unread: bool = False

    @functools.cached_property
    def data(self) -> Dataset:
        """The data set; `parallel` if the source has the user's own text instead of archives."""
        dataset = self.dataset or datasets()[self.settings["recipe"]]
        texts = [f"train.{language}" for language in self.languages]
        has_texts = texts and all(find_file(self.source, name) for name in texts)
        if not dataset.archives or not has_texts:
            return dataset
        is_raw = bool(self.settings.get("tokenize"))
        content = "tokenised and cleaned text"
        if is_raw:
            content = f"raw text, to be processed by the steps of {dataset.name}"
        log.info(f"{self.source} has {' and '.join(texts)}: used as {content}")
        return dataset.of_own_text(is_raw)

    @functools.cached_property
    def store(self) -> Store:
        """The store that finds or fetches the files of the data set."""
        return Store(self.source, self.downloads or self.root.parent / "downloads", self.offline)

    @functools.cached_property
    def parts(self) -> dict[str, list[Part]]:
        """split → its parts; {} if steps are only shown for a source that does not exist yet."""
        exists = self.source.exists() if self.source else self.data.downloadable
        if self.unread and not exists:
            return {}
        if not self.source:
            return self.data.parts(self.languages)
        return self.store.parts(self.data, self.languages, self.subsets)

    @functools.cached_property
    def texts(self) -> dict[str, list[TextFile]]:
        """split → its files, fetched and extracted if necessary; the files of two languages alternate."""
        if self.data.tokens:
            return self._texts_read()
        # All parts in one call, so that each archive is read once
        parts = list(itertools.chain.from_iterable(self.parts.values()))
        codes = self.data.codes
        files = self.store.fetch_texts(parts, [codes] if codes else [], self.data, self.root)
        if codes in files:
            # The merges of a text that was segmented elsewhere, for fine-tuning a model on other text
            with atomic_write(self.root / CODES) as stream:
                stream.writelines(f"{line}\n" for line in read_lines(files[codes].path))
        return {split: [files[part] for part in parts] for split, parts in self.parts.items()}

    def _texts_read(self) -> dict[str, list[TextFile]]:
        """split → the files from which its tokens were taken, and those on which pieces were learnt."""
        facts = read_step_records(self.root).get("text", {}).get("facts") or {}
        texts = {}
        for split, parts in self.parts.items():
            count = facts.get(split, {}).get("parts", 0)
            if split == "train":
                count = max(count, self.data.learn_on)
            texts[split] = list(map(self.text_file, parts[:count]))
        return texts

    def text_file(self, part: Part) -> TextFile:
        """The file of one part, fetched if necessary."""
        return self.store.fetch_texts([part])[part]

    @property
    def learnt(self) -> bool:
        """True if the pieces, or merges, are learnt here on the training text."""
        if self.data.kind == LANGUAGE_MODELING:
            return self.data.encoder == SENTENCEPIECE
        return bool(self.languages and self.settings["bpe"])

    @property
    def unknown_remedy(self) -> str:
        """A remedy for <unk> in the training text, as a sentence."""
        flag = "--character-coverage 1 (data.character_coverage: 1.0)"
        if self.data.released_pieces:
            return f"SwitchHead's release has the same (docs/defaults.md). For text_sp give {flag}."
        if self.data.kind == LANGUAGE_MODELING and not self.data.bring:
            return f"It is not changed, so that results stay comparable. For text_sp give {flag}."
        if self.data.kind == LANGUAGE_MODELING:
            return f"U+2585 and NUL never get a piece: remove them. Give every other letter one by {flag}."
        if self.settings.get("segmentation") == SENTENCEPIECE:
            return "Split letters into bytes by --byte-fallback (data.byte_fallback: true)."
        return "Flags of fairseq-preprocess (data.flags) leave words out: raise their limits."

    @property
    def languages(self) -> tuple[str, ...]:
        """(source, target), or () for data of one language."""
        sides = (self.settings.get("source"), self.settings.get("target"))
        return tuple(filter(None, sides))

    @property
    def joined(self) -> bool:
        """Whether both languages have one dictionary."""
        return bool(self.languages) and self.settings["joined_dictionary"]

    def part_checksum(self, part: Part) -> str | None:
        """The checksum of a part's file; None if the file would have to be fetched."""
        path = self.store.local_file(part)
        return self.checksum(path) if path else None

    def checksum(self, path: Path) -> str:
        """The sha256 of a file from which the data is made."""
        return known_checksum(self.store.downloads / MEMORY, path)

    def text_inputs(self) -> Values:
        """split → markup and sha256 of each file of its text."""
        inputs = {}
        for split, files in self.texts.items():
            inputs[split] = [[file.markup, self.checksum(file.path)] for file in files]
        return inputs

    def binarise(
        self,
        text: Step,
        splits: Sequence[str],
        name: str = "",
        dictionaries: Mapping[str, Any] | None = None,
        finish: Callable[[Path, dict[str, Symbols]], Any] | None = None,
    ) -> Step:
        """The step that binarises a text by fairseq-preprocess.

        Args:
            text: the step that makes the text.
            splits: the splits; all but train and valid are given to fairseq-preprocess as tests.
            name: for a classifier, the name of the folder of sentences or of classes.
            dictionaries: flags of fairseq-preprocess that name existing dictionaries.
            finish: called with the new folder and the numbers of its symbols; adds further files to it.
        """
        values = self._preprocess_flags(text.output / name, splits, dictionaries or {})
        settings = {key: value for key, value in values.items() if key != "workers"}

        def check(new: Path) -> dict[str, int]:
            if name:
                return {split: check_stem(new / split) for split in splits}
            sentences = check_binarised(new, self.languages, splits, self.joined)
            counts = count_symbols(new, self.languages, splits)
            allowed = bool(self.settings.get("allow_unknown"))
            check_unknown(counts, text.output, self.learnt, allowed, self.unknown_remedy)
            if finish:
                finish(new, counts)
            return sentences

        return Step(
            f"binarised-{name}" if name else "binarised",
            self.root / "binarised" / name,
            ["fairseq-preprocess", *flags(values), "--destdir", OUT],
            {"text": text, "settings": settings, "splits": list(splits)},
            finish=check,
        )

    def _preprocess_flags(
        self, folder: Path, splits: Sequence[str], dictionaries: Mapping[str, Any]
    ) -> Values:
        """The flags of fairseq-preprocess for the text in a folder, except --destdir."""
        kind = self.data.kind
        values: Values = {}
        if self.languages:
            source, target = self.languages
            values |= {"source-lang": source, "target-lang": target}
            values["joined-dictionary"] = self.joined
        else:
            # With a fixed dictionary, a class has the same number in all generated data
            has_dictionary = kind in (MASKED_LM, CLASSIFICATION)
            values["only-source"] = True
            values["srcdict"] = str(folder / DICTIONARY) if has_dictionary else None
        for split in ("train", "valid"):
            if split in splits:
                values[f"{split}pref"] = str(folder / split)
        tests = [str(folder / split) for split in splits if split not in ("train", "valid")]
        values["testpref"] = ",".join(tests) or None
        values["workers"] = 1 if kind == CLASSIFICATION else self.workers
        values.update(dictionaries)
        values |= self.data.preprocess
        if kind in (TRANSLATION, MASKED_LM):
            values |= self.settings.get("flags", {})
        return values

    def manifest(self, last: Step, **settings: Any) -> Step:
        """The step that writes manifest.json after the step `last`, with further settings to record."""

        def write(new: Path) -> None:
            data = self.data
            recipe = self.settings if self.languages else {"recipe": data.name}
            counts = {}
            folder = self.root / "binarised"
            if data.kind != CLASSIFICATION and folder.is_dir():
                counts = count_symbols(folder, self.languages, list(self.parts) or self.subsets)
            choices = dict(recipe) | settings
            origins = self.store.origins
            write_json(new, manifest_of(self.root, choices, origins, self.texts, data, counts))

        return Step("manifest", self.root / MANIFEST, write, {"last": last, "of": self.data.name})
