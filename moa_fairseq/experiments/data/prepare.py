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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data import monolingual
from moa_fairseq.experiments.data.binarised import (
    DICTIONARY,
    INPUT,
    LABEL,
    Prepared,
    check_binarised,
    check_place,
    check_stem,
    is_binarised,
    is_classification,
)
from moa_fairseq.experiments.data.catalogue import (
    CLASSIFICATION,
    LANGUAGE_MODELING,
    MASKED_LM,
    TRANSLATION,
    Dataset,
    Part,
    datasets,
)
from moa_fairseq.experiments.data.gpt2_files import (
    DICTIONARIES,
    ENCODER,
    OTHER_DICTIONARY,
    VOCAB,
    encode_texts,
    obtain_gpt2_files,
)
from moa_fairseq.experiments.data.listops import DIGITS, GROUPS, SYMBOLS, ListOps, write_split
from moa_fairseq.experiments.data.manifest import MANIFEST, manifest_of
from moa_fairseq.experiments.data.obtain import MEMORY, Store, known_checksum
from moa_fairseq.experiments.data.parallel_text import (
    BAD,
    WHOLE,
    Piece,
    PiecePair,
    find_file,
    hyphens,
    is_raw,
    read_lines,
    read_pairs,
)
from moa_fairseq.experiments.data.text_stages import Split, Treatment, learn_codes, write_splits
from moa_fairseq.experiments.json_files import write_json
from moa_fairseq.experiments.make import OUT, Step, fingerprint_of, make, marks
from moa_fairseq.files import atomic_write
from moa_fairseq.process import Executor, flags

CODES = "codes"
# pairs of the training text that are shown, that are looked at
SHOWN = 3
SAMPLE = 1000
log = logging.getLogger(__name__)


def default_workers() -> int:
    """As many processes as there are processors, at most 8."""
    return min(8, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Preparation:
    """One data section of a recipe, ready to be carried out.

    settings: the recipe's `data` section as a mapping. subsets: those that training and scoring need. source:
    the --data folder, or None for a data set that is downloaded or drawn. root: where the stages are kept.
    downloads: where public files are kept (beside `root` unless given). dataset: in place of the table's row.
    commands: the file that keeps the commands. whole: the line that makes all of it. unread: the steps are
    only shown, and the source may not be there yet.
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

    def run(self) -> Prepared:
        """Make what is not there yet. Raises UserError for unusable data."""
        check_place(self.root)
        if self.source and (self.settings["recipe"] == "binarised" or is_binarised(self.source)):
            return self._given(self.source)
        # Two runs of one data set may start together: the second one waits and finds everything done.
        options: dict[str, Any] = {"executor": self.executor, "commands": self.commands, "whole": self.whole}
        make(self.steps(), self.root, patience=math.inf, **options)
        known = marks(self.root)
        made = known.get("binarised") or known.get(f"binarised-{LABEL}")
        if not made:  # plain text, which fairseq does not read
            return Prepared(self.root / "text", {}, known["text"]["fingerprint"])
        return Prepared(self.root / "binarised", made["facts"], made["fingerprint"])

    def _given(self, source: Path) -> Prepared:
        check_place(source)
        dataset = datasets().get(self.settings["recipe"])
        if dataset and is_classification(source) != (dataset.kind == CLASSIFICATION):
            problem = (
                f"--data {source} was binarised for another kind of model than data.recipe {dataset.name}"
            )
            raise UserError(f"{problem}: name the folder of that data set, or leave --data away.")
        log.info("%s: binarised already; used as it is", source)
        sentences = check_binarised(source, self.languages, self.subsets, self._joined)
        return Prepared(source, sentences, given_fingerprint(source))

    def steps(self) -> list[Step]:
        """All steps, in order; nothing is read but the names of files."""
        unknown = ", ".join(subset for subset in self.subsets if subset not in self.data.subsets)
        if unknown:
            has = f"{self.data.name} has {', '.join(self.data.subsets)}"
            raise UserError(f"The data has no subset {unknown} (generate.subsets, score.subsets); {has}.")
        return _KINDS[self.data.kind](self)

    @functools.cached_property
    def data(self) -> Dataset:
        """The data set; `parallel` where the source holds text of one's own in place of archives."""
        dataset = self.dataset or datasets()[self.settings["recipe"]]
        if dataset.archives:
            own = [f"train.{language}" for language in self.languages]
        else:
            own = []
        if self.source and own and all(find_file(self.source, name) for name in own):
            raw = bool(self.settings.get("tokenize"))
            form = f"raw text, which goes through the steps of {dataset.name}"
            if raw:
                what = form
            else:
                what = "tokenised and cleaned"
            log.info("%s holds %s: taken as %s", self.source, " and ".join(own), what)
            return dataset.of_own_text(raw)
        return dataset

    @functools.cached_property
    def store(self) -> Store:
        """Where its files come from."""
        return Store(self.source, self.downloads or self.root.parent / "downloads", self.offline)

    @functools.cached_property
    def parts(self) -> dict[str, list[Part]]:
        """split → its parts; {} where steps are only shown for a source that is not there yet."""
        if self.unread and not (self.source.exists() if self.source else self.data.downloadable):
            return {}
        if not self.source:
            return self.data.parts(self.languages)
        return self.store.parts(self.data, self.languages, self.subsets)

    @functools.cached_property
    def texts(self) -> dict[str, list[Piece]]:
        """split → its files, fetched and extracted where necessary; those of two languages alternate."""
        # All together, so that an archive is gone through once.
        flat = [*itertools.chain.from_iterable(self.parts.values())]
        codes = self.data.codes
        pieces = self.store.pieces(flat, [codes] if codes else [], self.data, self.root)
        if codes in pieces:
            # The merges by which text was segmented elsewhere: whoever fine-tunes a model on it needs them.
            with atomic_write(self.root / CODES) as stream:
                stream.writelines(line + "\n" for line in read_lines(pieces[codes].path))
        return {split: [pieces[part] for part in parts] for split, parts in self.parts.items()}

    @property
    def languages(self) -> tuple[str, ...]:
        """(source, target), or () for data of one language."""
        return tuple(self.settings[side] for side in ("source", "target") if self.settings.get(side))

    @property
    def _joined(self) -> bool:
        return bool(self.languages) and self.settings["joined_dictionary"]

    def checksum(self, path: Path) -> str:
        """sha256 of a file that the data is made from."""
        return known_checksum(self.store.downloads / MEMORY, path)

    def read(self) -> dict[str, Any]:
        """split → markup and sha256 of each of its files."""
        return {
            split: [[piece.markup, self.checksum(piece.path)] for piece in pieces]
            for split, pieces in self.texts.items()
        }

    def binarise(
        self,
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
        kind = self.data.kind
        tests = [str(folder / split) for split in splits if split not in ("train", "valid")]
        if self.languages:
            sides: dict[str, Any] = dict(zip(("source-lang", "target-lang"), self.languages))
        else:
            # By a dictionary of its own, a class keeps its number, whatever was drawn.
            if kind in (MASKED_LM, CLASSIFICATION):
                given = str(folder / DICTIONARY)
            else:
                given = None
            sides = {"only-source": True, "srcdict": given}
        values = {
            **sides,
            **{f"{split}pref": str(folder / split) for split in ("train", "valid") if split in splits},
            "testpref": ",".join(tests) or None,
            **({"joined-dictionary": self._joined} if self.languages else {}),
            "workers": 1 if kind == CLASSIFICATION else self.workers,
            **self.data.preprocess,
            **(self.settings.get("flags", {}) if kind in (TRANSLATION, MASKED_LM) else {}),
            "destdir": OUT,
        }

        def check(new: Path) -> dict[str, int]:
            finish(new)
            if name:
                return {split: check_stem(new / split) for split in splits}
            return check_binarised(new, self.languages, splits, self._joined)

        settings = {key: value for key, value in values.items() if key not in ("workers", "destdir")}
        return Step(
            f"binarised-{name}" if name else "binarised",
            self.root / "binarised" / name,
            ["fairseq-preprocess", *flags(values)],
            {"text": text, "settings": settings, "splits": list(splits)},
            finish=check,
        )

    def manifest(self, last: Step, **settings: Any) -> Step:
        """manifest.json of what the steps up to `last` made."""

        def write(new: Path) -> None:
            if self.languages:
                described = {**self.settings, **settings}
            else:
                described = {"recipe": self.data.name, **settings}
            origins = self.store.origins
            write_json(new, manifest_of(self.root, described, origins, self.texts, self.data))

        return Step("manifest", self.root / MANIFEST, write, {"last": last, "of": self.data.name})


def _translation(job: Preparation) -> list[Step]:
    """tokens → bpe → sample → binarised."""
    settings = job.settings
    languages = job.languages
    data = job.data
    tokens = text = job.root / "tokens"
    merges = settings["bpe"]
    given = settings.get("codes")
    splits = list(job.parts or job.subsets)
    if data.hold_out and data.hold_out.split not in splits:
        splits.insert(1, data.hold_out.split)

    def pairs(split: str) -> list[PiecePair]:
        pieces = job.texts.get(split, [])
        return list(zip(pieces[::2], pieces[1::2]))

    def pair(folder: Path, split: str) -> PiecePair:
        return Piece(folder / f"{split}.{languages[0]}"), Piece(folder / f"{split}.{languages[1]}")

    def tokenised() -> list[Split]:
        found = []
        for split in job.parts:
            steps = [data.steps_for(split, language, settings) for language in languages]
            treatment = Treatment((steps[0], steps[1]), cleaning=data.cleaning("tokens", split))
            train = split == "train"
            own = not data.downloadable
            hold_out = data.hold_out if train else None
            found.append(Split(split, pairs(split), treatment, hold_out, train, own))
        return found

    def token_inputs() -> dict[str, Any]:
        treated = [[split.name, split.treatment, split.hold_out] for split in tokenised()]
        return {"languages": languages, "texts": job.read(), "splits": treated}

    def tokenise(new: Path) -> dict[str, Any]:
        found = itertools.islice(read_pairs(pairs("train"), mark_bad=True), SAMPLE)
        sample = [sides for sides in found if not any(side.startswith(BAD) for side in sides)]
        # For people, who see whether the sides belong together, and whether the text is segmented already.
        for sides in sample[:SHOWN]:
            log.info("  %s", " | ".join(f"{one}: {side[:60].strip()}" for one, side in zip(languages, sides)))
        asked = datasets()[settings["recipe"]]
        taken = not data.steps and not data.codes and settings.get("tokenize") is None
        if taken and is_raw(itertools.chain(*sample)):
            way = datasets()[asked.raw or asked.name]
            if asked.raw:
                sets = f"--set data.recipe={way.name} --set data.bpe={way.merges} "
            else:
                sets = ""
            if way.name == "parallel":
                what = "Moses' tokeniser"
            else:
                what = f"the steps of {way.name}"
            raise UserError(
                f"{pairs('train')[0][0].path} looks like raw text: `moa-fairseq prepare {way.name}` with "
                f"--tokenize (in a recipe: {sets}--set data.tokenize=true) takes it through {what}, "
                f"--no-tokenize (data.tokenize=false) takes it as it stands."
            )
        if asked.splits_hyphens and not data.steps and hyphens(itertools.chain(*sample)) == WHOLE:
            log.warning(
                "%s has compounds with their hyphens (a-b), which %s splits (a @-@ b): BLEU of it is not "
                "comparable with the paper's without a compound split",
                *(pairs("train")[0][1].path, asked.name),
            )
        return write_splits(tokenised(), languages, new, job.workers)

    def segment(new: Path) -> dict[str, Any]:
        new.mkdir()
        if given:
            shutil.copyfile(given, new / CODES)
        else:
            log.info("learning %s joint BPE merges", f"{merges:,}")
            learn_codes([tokens / f"train.{language}" for language in languages], merges, new / CODES)
        treatments = {split: Treatment(codes=str(new / CODES), cleaning=cleaning[split]) for split in splits}
        segmented = [Split(split, [pair(tokens, split)], how) for split, how in treatments.items()]
        return write_splits(segmented, languages, new, job.workers)

    def segment_inputs() -> dict[str, Any]:
        if given and not Path(given).is_file():
            raise UserError(f"data.codes: there is no file {given} with BPE merges.")
        if given:
            learned = job.checksum(Path(given))
        else:
            learned = merges
        return {"tokens": steps[0], "codes": learned, "cleaning": cleaning}

    steps = [Step("tokens", tokens, tokenise, token_inputs)]
    if merges is not None or given:
        text = job.root / "bpe"
        cleaning = {split: data.cleaning("bpe", split) for split in splits}
        steps.append(Step("bpe", text, segment, segment_inputs))
    fraction = settings.get("train_fraction")
    seed = settings.get("train_fraction_seed", 1)
    if fraction not in (None, 1):
        whole = text
        text = job.root / "sample"

        def sample(new: Path) -> dict[str, int]:
            new.mkdir()
            for split in splits:
                for one, other in zip(pair(whole, split), pair(new, split)):
                    if split != "train":
                        os.link(one.path, other.path)
            return sample_pairs(pair(whole, "train"), pair(new, "train"), fraction, seed)

        steps.append(Step("sample", text, sample, {"text": steps[-1], "fraction": fraction, "seed": seed}))
    steps.append(job.binarise(steps[-1], splits))
    return [*steps, job.manifest(steps[-1])]


def sample_pairs(source: PiecePair, destination: PiecePair, fraction: float, seed: int) -> dict[str, int]:
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


def _language_modeling(job: Preparation) -> list[Step]:
    """Text in a vocabulary of its own: (model →) text (→ binarised)."""
    data = job.data
    folder = job.root / "model"
    steps: list[Step] = []
    pieces = job.settings.get("bpe") or data.pieces

    def read() -> dict[str, Any]:
        return {"encoder": data.encoder, "texts": job.read(), "splits": dict(data.byte_splits)}

    def learn(new: Path) -> dict[str, int]:
        log.info("learning %s SentencePiece pieces", f"{pieces:,}")
        return monolingual.train_pieces(job.texts["train"], pieces, new)

    def write(new: Path) -> dict[str, Any]:
        if data.encoder == "bytes":
            facts = monolingual.write_bytes(job.texts, data.byte_splits, new)
        elif data.encoder == "sentencepiece":
            facts = monolingual.write_pieces(job.texts, folder / monolingual.MODEL, new, job.workers)
        else:
            facts = monolingual.write_lines(job.texts, new)
        for split, fact in facts.items():
            log.info("%s: %s", split, ", ".join(f"{number:,} {what}" for what, number in fact.items()))
        return facts

    if data.encoder == "sentencepiece":
        steps.append(Step("model", folder, learn, lambda: {**read(), "pieces": pieces}))
    model = {"model": steps[0]} if steps else {}
    steps.append(Step("text", job.root / "text", write, lambda: {**read(), **model}))
    if data.encoder != "none":
        steps.append(job.binarise(steps[-1], data.subsets))
    return [*steps, job.manifest(steps[-1])]


def _masked_lm(job: Preparation) -> list[Step]:
    """Running text in GPT-2's encoding: bpe → binarised, whose folder has the manifest."""
    data = job.data
    bpe = job.root / "bpe"

    @functools.cache
    def encoding() -> Any:
        return obtain_gpt2_files([job.source] if job.source else [], offline=job.offline)

    def read() -> dict[str, Any]:
        dictionary = job.checksum(encoding().dictionary)
        return {"texts": job.read(), "dictionary": dictionary, "order": encoding().order}

    def encode(new: Path) -> dict[str, Any]:
        files = encoding()
        texts = {split: piece.path for split, (piece,) in job.texts.items()}
        facts = encode_texts(texts, new, files, job.workers)
        for path, name in ((files.encoder, ENCODER), (files.vocab, VOCAB), (files.dictionary, DICTIONARY)):
            shutil.copyfile(path, new / name)
        for split, fact in facts.items():
            words = fact["words"] + fact["lines"]
            expected = data.words.get(split)
            if expected not in (None, words):
                warning = f"; WARNING: {expected:,} words were expected"
            else:
                warning = ""
            log.info(
                f"{split} ({fact['file']}): {fact['lines']:,} lines, {words:,} words with one end of line "
                f"each, {fact['subwords']:,} subwords; <unk> {fact['unk']:,} times, @-@ {fact['hyphen']:,} "
                f"times{warning}"
            )
        return {"dictionary": files.order, "splits": facts}

    def finish(new: Path) -> None:
        for name in (ENCODER, VOCAB):
            shutil.copyfile(bpe / name, new / name)
        facts = {"licence": data.licence, "sources": job.store.origins, **marks(job.root)["bpe"]["facts"]}
        if "srcdict" in job.settings["flags"]:
            facts["dictionary"] = OTHER_DICTIONARY
        write_json(new / MANIFEST, {"recipe": data.name, **facts})
        log.info("dictionary: %s", DICTIONARIES[facts["dictionary"]])

    encoded = Step("bpe", bpe, encode, read)
    return [encoded, job.binarise(encoded, list(job.parts or job.subsets), finish=finish)]


def _classification(job: Preparation) -> list[Step]:
    """Sentences that are drawn by a seed: text → binarised, the sentences, the classes and the groups."""
    settings = dict(job.data.generated)

    def draw(new: Path) -> dict[str, Any]:
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
    both = [job.binarise(text, job.data.subsets, name) for name in (INPUT, LABEL)]
    groups = Step(
        f"binarised-{GROUPS}",
        job.root / "binarised" / GROUPS,
        lambda new: shutil.copytree(text.output / GROUPS, new) and None,
        {"text": text},
    )
    return [text, *both, groups, job.manifest(both[-1], generated=settings)]


_KINDS: dict[str, Callable[[Preparation], list[Step]]] = {
    TRANSLATION: _translation,
    LANGUAGE_MODELING: _language_modeling,
    MASKED_LM: _masked_lm,
    CLASSIFICATION: _classification,
}


def given_fingerprint(source: Path) -> str:
    """Of a binarised folder that was made elsewhere."""
    # File sizes tell apart two preparations; reading gigabytes to be sure is not worth the wait.
    if is_classification(source):
        place = source / INPUT
    else:
        place = source
    files = [path for path in sorted(place.glob("*.*")) if path.suffix in (".bin", ".idx", ".txt")]
    return fingerprint_of("given", {path.name: path.stat().st_size for path in files if path.is_file()})


def prepared_folder(settings: Mapping[str, Any], source: Path | None, parent: Path) -> Path:
    """Where the stages of a data section are kept: another folder for other settings or another source."""
    place = str(source.resolve()) if source else ""
    name = "_".join(settings[key] for key in ("recipe", "source", "target") if settings[key])
    return parent / f"{name}-{fingerprint_of(dict(settings), place)[:8]}"
