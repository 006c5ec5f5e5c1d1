"""From a data set to a binarised folder: the steps of each kind, each made once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from moa_fairseq.data_prep import inputs, monolingual
from moa_fairseq.data_prep.archives import extract
from moa_fairseq.data_prep.binarised import (
    DICTIONARY,
    INPUT,
    LABEL,
    Prepared,
    check_binarised,
    check_place,
    is_binarised,
    is_classification,
)
from moa_fairseq.data_prep.bpe import learn_codes
from moa_fairseq.data_prep.catalogue import (
    CLASSIFICATION,
    LANGUAGE_MODELING,
    MASKED_LM,
    TRANSLATION,
    Dataset,
    datasets,
)
from moa_fairseq.data_prep.gpt2_files import ENCODER, NUMERIC_ORDER, ROBERTA_ORDER, VOCAB, obtain_gpt2_files
from moa_fairseq.data_prep.listops import DIGITS, GROUPS, SYMBOLS, ListOps, write_split
from moa_fairseq.data_prep.manifest import MANIFEST, manifest_of
from moa_fairseq.data_prep.obtain import Store, known_checksum
from moa_fairseq.data_prep.parallel_text import Piece, PiecePair, find_file, read_lines
from moa_fairseq.data_prep.text_stages import Split, Treatment, write_splits
from moa_fairseq.errors import UserError
from moa_fairseq.files import atomic_write
from moa_fairseq.json_files import write_json
from moa_fairseq.running.command_line import flags
from moa_fairseq.running.make import OUT, Step, fingerprint_of, make, marks
from moa_fairseq.running.process import Executor
from moa_fairseq.text.workers import default_workers

CODES = "codes"
OTHER_DICTIONARY = "data.flags.srcdict"
# What manifest.json calls the dictionary of GPT-2's encoding, in words.
DICTIONARIES = {
    ROBERTA_ORDER: "RoBERTa's",
    NUMERIC_ORDER: "RoBERTa's entries in the order of their ids, as RoBERTa's own was not at hand",
    OTHER_DICTIONARY: "as data.flags.srcdict says (null: of the training text)",
}
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Preparation:
    """One data section of a recipe, ready to be carried out.

    settings: the recipe's `data` section as a mapping. subsets: those that training and scoring need. source:
    the --data folder (or .zip of running text), or None for a data set that is downloaded or drawn. root:
    where the stages are kept. downloads: where public files are kept (beside `root` unless given). dataset:
    in place of the table's row. commands: the file that keeps the commands. unread: the steps are only shown,
    and the source may not be there yet.
    """

    settings: Mapping[str, Any]
    subsets: Sequence[str]
    source: Optional[Path]
    root: Path
    executor: Executor = dataclasses.field(default_factory=Executor)
    downloads: Optional[Path] = None
    offline: bool = False
    workers: int = dataclasses.field(default_factory=default_workers)
    dataset: Optional[Dataset] = None
    commands: Optional[Path] = None
    unread: bool = False

    def run(self) -> Prepared:
        """Make what is not there yet. Raises UserError for unusable data."""
        check_place(self.root)
        if self.source and (self.settings["recipe"] == "binarised" or is_binarised(self.source)):
            return self._given(self.source)
        # Two runs of one data set may start together: the second one waits and finds everything done.
        options: Dict[str, Any] = {"executor": self.executor, "commands": self.commands}
        make(self.steps(), self.root, patience=math.inf, **options)
        known = marks(self.root)
        made = [name for name in ("binarised", f"binarised-{LABEL}") if name in known]
        if not made:  # plain text, which fairseq does not read
            return Prepared(self.root / "text", {}, known["text"]["fingerprint"])
        folder, splits = self.root / "binarised", known[made[-1]]["inputs"]["splits"]
        sentences = check_binarised(folder, self.languages, splits, self._joined)
        return Prepared(folder, sentences, known[made[-1]]["fingerprint"])

    def steps(self) -> List[Step]:
        """All steps, in order; nothing is read but the names of files."""
        dataset = self.dataset or datasets()[self.settings["recipe"]]
        own = [f"train.{language}" for language in self.languages] if dataset.archives else []
        if own and all(find_file(self.source, name) for name in own):
            log.info("%s holds %s: taken as tokenised and cleaned", self.source, " and ".join(own))
            dataset = datasets()["parallel"]
        unknown = ", ".join(subset for subset in self.subsets if subset not in dataset.subsets)
        if unknown:
            raise UserError(
                f"The data has no subset {unknown} (generate.subsets, score.subsets); {dataset.name} has "
                f"{', '.join(dataset.subsets)}."
            )
        store = Store(self.source, self.downloads or self.root.parent / "downloads", self.offline)
        return _KINDS[dataset.kind](self, dataset, store)

    @property
    def languages(self) -> Tuple[str, ...]:
        """(source, target), or () for data of one language."""
        return tuple(self.settings[side] for side in ("source", "target") if self.settings.get(side))

    @property
    def at_hand(self) -> Optional[Path]:
        """The source, whose names of files are read."""
        return None if self.unread and self.source and not self.source.exists() else self.source

    @property
    def _joined(self) -> bool:
        return bool(self.languages) and self.settings["joined_dictionary"]

    def checksum(self, path: Path) -> str:
        """sha256 of a file that the data is made from."""
        return known_checksum(self.root / "files.json", path)

    def _given(self, source: Path) -> Prepared:
        check_place(source)
        dataset = datasets().get(self.settings["recipe"])
        if dataset and is_classification(source) != (dataset.kind == CLASSIFICATION):
            raise UserError(
                f"--data {source} was binarised for another kind of model than data recipe {dataset.name} is "
                "for: name the folder of that data set, or leave --data away."
            )
        log.info("%s: binarised already; used as it is", source)
        sentences = check_binarised(source, self.languages, self.subsets, self._joined)
        # File sizes tell apart two preparations; reading gigabytes to be sure is not worth the wait.
        place = source / INPUT if is_classification(source) else source
        files = [path for path in sorted(place.glob("*.*")) if path.suffix in (".bin", ".idx", ".txt")]
        sizes = {path.name: path.stat().st_size for path in files if path.is_file()}
        return Prepared(source, sentences, fingerprint_of("given", sizes))

    def binarise(
        self,
        dataset: Dataset,
        text: Step,
        splits: Sequence[str],
        name: str = "",
        finish: Callable[[Path], Any] = lambda new: None,
    ) -> Step:
        """fairseq-preprocess of the text that a step made.

        splits: all but train and valid are tests. name: of the folder of sentences or of classes. finish:
        puts what else belongs there into the new folder.
        """
        folder = text.output / name
        tests = [str(folder / split) for split in splits if split not in ("train", "valid")]
        own = self.settings.get("flags", {}) if dataset.kind in (TRANSLATION, MASKED_LM) else {}
        sides: Dict[str, Any] = {}
        if self.languages:
            sides = dict(zip(("source-lang", "target-lang"), self.languages))
        else:
            # By a dictionary of its own, a class keeps its number, whatever was drawn.
            given = str(folder / DICTIONARY) if dataset.kind in (MASKED_LM, CLASSIFICATION) else None
            sides = {"only-source": True, "srcdict": given}
        values = {
            **sides,
            **{f"{split}pref": str(folder / split) for split in ("train", "valid") if split in splits},
            "testpref": ",".join(tests) or None,
            **({"joined-dictionary": self._joined} if self.languages else {}),
            "workers": 1 if dataset.kind == CLASSIFICATION else self.workers,
            **dataset.preprocess,
            **own,
            "destdir": OUT,
        }

        def check(new: Path) -> Any:
            finish(new)
            return None if name else check_binarised(new, self.languages, splits, self._joined)

        output = self.root / "binarised" / name if name else self.root / "binarised"
        settings = {key: value for key, value in values.items() if key not in ("workers", "destdir")}
        return Step(
            f"binarised-{name}" if name else "binarised",
            output,
            ["fairseq-preprocess", *flags(values)],
            {"text": text, "settings": settings, "splits": list(splits)},
            finish=check,
        )

    def manifest(
        self,
        last: Step,
        dataset: Dataset,
        settings: Mapping[str, Any],
        found: Callable[[], Tuple[Dict[str, Any], Dict[str, Sequence[Piece]]]] = lambda: ({}, {}),
    ) -> Step:
        """manifest.json; found: gives the origins of the files, and split → the texts that were read."""

        def write(new: Path) -> None:
            write_json(new, manifest_of(self.root, settings, *found(), dataset))

        return Step("manifest", self.root / MANIFEST, write, {"last": last})


def _translation(job: Preparation, dataset: Dataset, store: Store) -> List[Step]:
    """tokens → bpe → sample → binarised."""
    settings, languages, root = job.settings, job.languages, job.root
    ready = dataset.downloadable or job.at_hand
    parts = inputs.split_parts(dataset, settings, job.at_hand, job.subsets) if ready else {}
    splits = list(parts or job.subsets)
    if dataset.hold_out and dataset.hold_out.split not in splits:
        splits.insert(1, dataset.hold_out.split)

    @functools.cache
    def texts() -> Dict[str, List[PiecePair]]:
        """split → pairs of text files, fetched and extracted where necessary."""
        # Both languages together, so that an archive is gone through once.
        flat = [part for sides in parts.values() for side in sides for part in side]
        pieces = store.pieces(flat, [dataset.codes] if dataset.codes else [], dataset, root)
        if dataset.codes in pieces:
            # The merges by which text was segmented elsewhere: whoever fine-tunes a model on it needs them.
            with atomic_write(root / CODES) as stream:
                stream.writelines(line + "\n" for line in read_lines(pieces[dataset.codes].path))
        return {
            split: [(pieces[one], pieces[other]) for one, other in zip(*sides)]
            for split, sides in parts.items()
        }

    def tokenised() -> List[Split]:
        found = []
        for split, files in texts().items():
            steps = [dataset.steps_for(split, language) for language in languages]
            if settings.get("lowercase") and not any(name == "lowercase" for name, _ in steps[0]):
                steps = [(("lowercase", {}), *side) for side in steps]
            treatment = Treatment((steps[0], steps[1]), cleaning=dataset.cleaning("tokens", split))
            train = split == "train"
            found.append(Split(split, files, treatment, dataset.hold_out if train else None, lenient=train))
        return found

    def tokenise(new: Path) -> Dict[str, Any]:
        inputs.look_at(texts().get("train", ()), languages, merges is not None or bool(given))
        return write_splits(tokenised(), languages, new, job.workers)

    def token_inputs() -> Dict[str, Any]:
        described = [
            [split.name, split.treatment, split.hold_out]
            + [[piece.markup, job.checksum(piece.path)] for pair in split.files for piece in pair]
            for split in tokenised()
        ]
        return {"languages": languages, "splits": described}

    merges, given = settings["bpe"], settings.get("codes")
    steps = [Step("tokens", root / "tokens", tokenise, token_inputs)]
    tokens = text = root / "tokens"

    def pair(folder: Path, split: str) -> PiecePair:
        return Piece(folder / f"{split}.{languages[0]}"), Piece(folder / f"{split}.{languages[1]}")

    if merges is not None or given:
        text, cleaning = root / "bpe", {split: dataset.cleaning("bpe", split) for split in splits}

        def segment(new: Path) -> Dict[str, Any]:
            new.mkdir()
            if given:
                shutil.copyfile(given, new / CODES)
            else:
                log.info("learning %s joint BPE merges", f"{merges:,}")
                learn_codes([tokens / f"train.{language}" for language in languages], merges, new / CODES)
            segmented = [
                Split(
                    split,
                    [pair(tokens, split)],
                    Treatment(codes=str(new / CODES), cleaning=cleaning[split]),
                )
                for split in splits
            ]
            return write_splits(segmented, languages, new, job.workers)

        def segment_inputs() -> Dict[str, Any]:
            if given and not Path(given).is_file():
                raise UserError(f"data.codes: there is no file {given} with BPE merges.")
            learned = job.checksum(Path(given)) if given else merges
            return {"tokens": steps[0], "codes": learned, "cleaning": cleaning}

        steps.append(Step("bpe", text, segment, segment_inputs))
    fraction, seed = settings.get("train_fraction"), settings.get("train_fraction_seed", 1)
    if fraction not in (None, 1):
        whole, text = text, root / "sample"

        def sample(new: Path) -> Dict[str, int]:
            new.mkdir()
            for split in splits:
                for one, other in zip(pair(whole, split), pair(new, split)):
                    if split != "train":
                        os.link(one.path, other.path)
            return sample_pairs(pair(whole, "train"), pair(new, "train"), fraction, seed)

        steps.append(Step("sample", text, sample, {"text": steps[-1], "fraction": fraction, "seed": seed}))
    steps.append(job.binarise(dataset, steps[-1], splits))

    def found() -> Tuple[Dict[str, Any], Dict[str, Sequence[Piece]]]:
        return store.origins, {split: [*itertools.chain(*files)] for split, files in texts().items()}

    return [*steps, job.manifest(steps[-1], dataset, settings, found)]


def sample_pairs(source: PiecePair, destination: PiecePair, fraction: float, seed: int) -> Dict[str, int]:
    """Write fraction of the pairs of two files, one at least, in their order; returns how many (MAE §5.2).

    The sample of a smaller fraction is part of a larger one's with the same seed.
    """
    total = sum(1 for _ in read_lines(source[0].path))
    order = list(range(total))
    random.Random(seed).shuffle(order)
    kept = set(order[: max(1, math.ceil(total * fraction))])
    for old, new in zip(source, destination):
        with open(new.path, "w", encoding="utf-8", newline="\n") as stream:
            for number, line in enumerate(read_lines(old.path)):
                if number in kept:
                    stream.write(line + "\n")
    log.info("sample: %s of %s training pairs", f"{len(kept):,}", f"{total:,}")
    return {"lines": len(kept), "of": total}


def _language_modeling(job: Preparation, dataset: Dataset, store: Store) -> List[Step]:
    """Text in a vocabulary of its own: (model →) text (→ binarised)."""

    @functools.cache
    def texts() -> Dict[str, Sequence[Piece]]:
        pieces = store.pieces(dataset.parts(), (), dataset, job.root)
        return {split: [pieces[part] for part in rows] for split, rows in dataset.splits.items()}

    def read() -> Dict[str, Any]:
        digests = {split: [job.checksum(piece.path) for piece in rows] for split, rows in texts().items()}
        return {"encoder": dataset.encoder, "texts": digests, "splits": dict(dataset.byte_splits)}

    def learn(new: Path) -> Dict[str, int]:
        log.info("learning %s SentencePiece pieces", f"{dataset.pieces:,}")
        return monolingual.train_pieces(texts()["train"], dataset.pieces, new)

    def write(new: Path) -> Dict[str, Any]:
        if dataset.encoder == "bytes":
            facts = monolingual.write_bytes(texts(), dataset.byte_splits, new)
        elif dataset.encoder == "sentencepiece":
            model = job.root / "model" / monolingual.MODEL
            facts = monolingual.write_pieces(texts(), model, new, job.workers)
        else:
            facts = monolingual.write_lines(texts(), new)
        for split, fact in facts.items():
            log.info("%s: %s", split, ", ".join(f"{number:,} {what}" for what, number in fact.items()))
        return facts

    steps = []
    if dataset.encoder == "sentencepiece":
        made = lambda: {**read(), "pieces": dataset.pieces}  # noqa: E731
        steps.append(Step("model", job.root / "model", learn, made))
    model = {"model": steps[0]} if steps else {}
    steps.append(Step("text", job.root / "text", write, lambda: {**read(), **model}))
    if dataset.encoder != "none":
        steps.append(job.binarise(dataset, steps[-1], dataset.subsets))
    settings = {"recipe": dataset.name}
    found = lambda: (store.origins, texts())  # noqa: E731
    return [*steps, job.manifest(steps[-1], dataset, settings, found)]


def _masked_lm(job: Preparation, dataset: Dataset, store: Store) -> List[Step]:
    """Running text in GPT-2's encoding: bpe → binarised, whose folder has the manifest."""
    source, root, steps = job.at_hand, job.root, []
    own = source is not None and (not dataset.downloadable or inputs.has_text(source, dataset))
    given = inputs.find_text(source, dataset, job.subsets, root / "text") if own and source else {}
    splits = [split for split in dataset.splits if split in (given or dataset.splits)]
    if source and source.is_file():
        names = {path.name for path in given.values()}

        def unpack(new: Path) -> Dict[str, int]:
            return extract(source, names, new, lambda path: Path(path).name)  # whatever folder it stands in

        steps.append(Step("text", root / "text", unpack, {"archive": source, "names": sorted(names)}))

    @functools.cache
    def texts() -> Dict[str, Path]:
        if own:
            return given
        pieces = store.pieces(dataset.parts(), (), dataset, root)
        return {split: piece.path for split, piece in zip(dataset.splits, pieces.values())}

    @functools.cache
    def encoding() -> Any:
        return obtain_gpt2_files([source] if source else [], offline=job.offline)

    def read() -> Dict[str, Any]:
        dictionary = encoding().dictionary
        return {
            "texts": {path.name: job.checksum(path) for path in texts().values()},
            "dictionary": {dictionary.name: job.checksum(dictionary)},
            "order": encoding().order,
        }

    def encode(new: Path) -> Dict[str, Any]:
        # Imported late: a second run that has nothing to do should not wait for it.
        from moa_fairseq.data_prep.gpt2_bpe import encode_texts

        facts = encode_texts(texts(), new, encoding(), job.workers)
        files = encoding()
        for path, name in ((files.encoder, ENCODER), (files.vocab, VOCAB), (files.dictionary, DICTIONARY)):
            shutil.copyfile(path, new / name)
        for split, fact in facts.items():
            words, expected = fact["words"] + fact["lines"], dataset.words.get(split)
            warning = f"; WARNING: {expected:,} words were expected" if expected not in (None, words) else ""
            log.info(
                f"{split} ({fact['file']}): {fact['lines']:,} lines, {words:,} words with one end of line "
                f"each, {fact['subwords']:,} subwords; <unk> {fact['unk']:,} times, @-@ {fact['hyphen']:,} "
                f"times{warning}"
            )
        return {"dictionary": files.order, "splits": facts}

    def finish(new: Path) -> None:
        for name in (ENCODER, VOCAB):
            shutil.copyfile(root / "bpe" / name, new / name)
        facts: Dict[str, Any] = {"licence": dataset.licence if dataset.downloadable else ""}
        if not own:
            facts["sources"] = store.origins
        facts.update(marks(root)["bpe"]["facts"])
        if "srcdict" in job.settings["flags"]:
            facts["dictionary"] = OTHER_DICTIONARY
        write_json(new / MANIFEST, {"recipe": dataset.name, **facts})
        log.info("dictionary: %s", DICTIONARIES[facts["dictionary"]])

    steps.append(Step("bpe", root / "bpe", encode, read))
    return [*steps, job.binarise(dataset, steps[-1], splits, finish=finish)]


def _classification(job: Preparation, dataset: Dataset, store: Store) -> List[Step]:
    """Sentences that are drawn by a seed: text → binarised, the sentences, the classes and the groups."""
    settings = dict(dataset.generated)

    def draw(new: Path) -> Dict[str, Any]:
        total = sum(settings["sizes"].values())
        log.info("drawing %s expressions by seed %d", f"{total:,}", settings["seed"])
        for name, symbols in ((INPUT, SYMBOLS), (LABEL, DIGITS)):
            with atomic_write(new / name / DICTIONARY) as stream:
                stream.writelines(f"{symbol} 1\n" for symbol in symbols)
        drawn = ListOps(**settings).splits(job.workers)
        facts = {split: write_split(new, split, found) for split, found in drawn.items()}
        for split, fact in facts.items():
            log.info("%s: %s expressions, %s tokens", split, f"{fact['lines']:,}", f"{fact['tokens']:,}")
        return facts

    text = Step("text", job.root / "text", draw, {"listops": settings})
    both = [job.binarise(dataset, text, dataset.subsets, name) for name in (INPUT, LABEL)]
    groups = Step(
        f"binarised-{GROUPS}",
        job.root / "binarised" / GROUPS,
        lambda new: shutil.copytree(text.output / GROUPS, new) and None,
        {"text": text},
    )
    described = {"recipe": dataset.name, "generated": settings}
    return [text, *both, groups, job.manifest(both[-1], dataset, described)]


_KINDS: Dict[str, Callable[[Preparation, Dataset, Store], List[Step]]] = {
    TRANSLATION: _translation,
    LANGUAGE_MODELING: _language_modeling,
    MASKED_LM: _masked_lm,
    CLASSIFICATION: _classification,
}


def prepared_folder(settings: Mapping[str, Any], source: Optional[Path], parent: Path) -> Path:
    """Where the stages of a data section are kept: another folder for other settings or another source."""
    place = str(source.resolve()) if source else ""
    name = "_".join(settings[key] for key in ("recipe", "source", "target") if settings[key])
    return parent / f"{name}-{fingerprint_of(dict(settings), place)[:8]}"
