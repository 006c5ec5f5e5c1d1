"""The steps of running text, for causal and for masked language models."""

import functools
import itertools
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.experiments.data import monolingual, pieces
from moa_fairseq.experiments.data.binarised import DICTIONARY
from moa_fairseq.experiments.data.gpt2_files import (
    DICTIONARIES,
    ENCODER,
    OTHER_DICTIONARY,
    VOCAB,
    encode_texts,
    obtain_gpt2_files,
)
from moa_fairseq.experiments.data.job import PreparationJob
from moa_fairseq.experiments.data.manifest import MANIFEST, symbols_of
from moa_fairseq.experiments.data.obtain import before_growth
from moa_fairseq.experiments.data.unknown import Symbols
from moa_fairseq.experiments.make import Step, read_step_records
from moa_fairseq.experiments.records.json_files import Values, write_json

log = logging.getLogger(__name__)


def language_modeling_steps(job: PreparationJob) -> list[Step]:
    """The steps of text with a vocabulary of its own: (model →) text (→ binarised)."""
    return LanguageModelPreparation(job).steps()


class LanguageModelPreparation:
    """The steps of running text with a vocabulary of its own.

    Args:
        job: the data section of the recipe, and the files of the data set.
    """

    def __init__(self, job: PreparationJob):
        self.job = job
        self.data = job.data
        self.model = job.root / "model"
        self.learning = dict(pieces.LANGUAGE_MODEL)
        if self.data.released_pieces:
            self.learning = dict(pieces.RELEASED)
        if job.settings.get("character_coverage"):
            self.learning["character_coverage"] = job.settings["character_coverage"]
        self.count = job.settings.get("bpe") or self.data.pieces
        self.most = dict(self.data.tokens)
        if job.settings.get("tokens"):
            self.most["train"] = job.settings["tokens"]
        self.is_announced = False

    def steps(self) -> list[Step]:
        """All steps in their order, the manifest included."""
        text_inputs: Values = {}
        steps = []
        if self.data.encoder == "sentencepiece":
            model_inputs: Values = {"pieces": self.count}
            # Older versions did not count the settings of released pieces as an input
            if not self.data.released_pieces:
                model_inputs["settings"] = self.learning
            inputs = functools.partial(self._inputs, model_inputs)
            steps.append(Step("model", self.model, self.learn, inputs, used=self._digests))
            text_inputs["model"] = steps[0]
        if self.data.tokens:
            text_inputs["tokens"] = self.most
        inputs = functools.partial(self._inputs, text_inputs)
        steps.append(Step("text", self.job.root / "text", self.write, inputs, used=self._digests))
        if self.data.encoder != "none":
            steps.append(self.job.binarise(steps[-1], self.data.subsets))
        settings = {"tokens": self.most} if self.most else {}
        return [*steps, self.job.manifest(steps[-1], **settings)]

    def learn(self, new: Path) -> Values:
        """Learn the SentencePiece model. Returns its facts and settings."""
        log.info("learning %s SentencePiece pieces", f"{self.count:,}")
        data = self.data
        job = self.job
        if data.tokens:
            self._announce()
            first_parts = job.parts["train"][: data.learn_on]
            texts = list(map(job.text_file, first_parts))
        else:
            texts = job.texts["train"]
        lines = itertools.chain.from_iterable(text.lines() for text in texts)
        model = new / pieces.MODEL
        facts: Values = pieces.learn(
            lines,
            texts[0].path,
            self.count,
            model,
            released=data.released_pieces,
            fixed=not data.bring,
            **self.learning,
        )
        if facts["left_out"]:
            log.warning(
                f"SentencePiece did not learn from {facts['left_out']:,} of {facts['lines']:,} lines, which "
                f"have more than {pieces.LONGEST:,} bytes: SwitchHead's release does the same "
                "(docs/defaults.md)"
            )
        facts["settings"] = self.learning
        if data.tokens:
            facts["train"] = {"files": {part.name: job.digest(part) for part in first_parts}}
        return facts

    def write(self, new: Path) -> Values:
        """Write the text of each split in symbols."""
        job = self.job
        if self.data.encoder == "bytes":
            facts = monolingual.write_bytes(job.texts, self.data.byte_splits, new)
        elif self.data.tokens:
            facts = self._grow(new)
        elif self.data.encoder == "sentencepiece":
            facts = monolingual.write_pieces(job.texts, self.model / pieces.MODEL, new, job.workers)
        else:
            facts = monolingual.write_lines(job.texts, new)
        for split, fact in facts.items():
            counts = []
            for unit in ("lines", "tokens", "bytes", "parts"):
                if unit in fact:
                    counts.append(f"{fact[unit]:,} {unit}")
            if "longest" in fact:
                counts.append(f"the longest line has {fact['longest']:,} bytes")
            log.info("%s: %s", split, ", ".join(counts))
        return facts

    def _grow(self, new: Path) -> Values:
        """Write the first tokens of each split, as many as are requested."""
        self._announce()
        job = self.job
        growing = job.root / "growing"  # survives an interruption, unlike the step's own folder
        model = self.model / pieces.MODEL
        facts = {}
        for split, parts in job.parts.items():
            facts[split] = monolingual.grow_pieces(
                parts,
                job.text_file,
                job.digest,
                model,
                growing / split,
                self.most[split],
                job.workers,
            )
        new.mkdir()
        for split in facts:
            shutil.move(growing / split, new / split)
        shutil.rmtree(growing)
        return facts

    def _inputs(self, more: Mapping[str, Any]) -> Values:
        """What a step depends on, except for files that are only known after they were read."""
        inputs: Values = {"encoder": self.data.encoder}
        if self.data.tokens:  # many files, fetched only as needed: see `_digests`
            inputs["files"] = self.data.name
        else:
            inputs.update(texts=self.job.text_inputs(), splits=dict(self.data.byte_splits))
        inputs.update(more)
        return inputs

    def _digests(self, facts: Mapping[str, Any] | None, recount: bool) -> Values:
        """The checksums of the files that were read, computed again (recount) if the files still exist."""
        content: Values = {}
        if not self.data.tokens:
            return content
        for split, parts in self.job.parts.items():
            recorded = ((facts or {}).get(split) or {}).get("files") or {}
            if not recorded:  # by an older version
                continue
            digests = {}
            for part in parts:
                if part.name in recorded:
                    again = self.job.digest(part) if recount else None
                    digests[part.name] = again or recorded[part.name]
            content[f"content of {split}"] = digests
        return content

    def _announce(self) -> None:
        """Print the terms and the size of the text once, and check the disk."""
        if not self.is_announced:
            before_growth(self.data, self.job.store, sum(self.most.values()), self.job.root)
            self.is_announced = True


def masked_lm_steps(job: PreparationJob) -> list[Step]:
    """The steps of running text in GPT-2's encoding: bpe → binarised, whose folder also has the manifest."""
    data = job.data
    bpe = job.root / "bpe"

    @functools.cache
    def encoding() -> Any:
        return obtain_gpt2_files([job.source] if job.source else [], offline=job.offline)

    def read() -> Values:
        dictionary = job.checksum(encoding().dictionary)
        return {"texts": job.text_inputs(), "dictionary": dictionary, "order": encoding().order}

    def encode(new: Path) -> Values:
        files = encoding()
        texts = {split: piece.path for split, (piece,) in job.texts.items()}
        facts = encode_texts(texts, new, files, job.workers)
        shutil.copyfile(files.encoder, new / ENCODER)
        shutil.copyfile(files.vocab, new / VOCAB)
        shutil.copyfile(files.dictionary, new / DICTIONARY)
        for split, fact in facts.items():
            words = fact["words"] + fact["lines"]
            expected = data.words.get(split)
            is_expected = expected in (None, words)
            warning = "" if is_expected else f"; WARNING: {expected:,} words were expected"
            log.info(
                f"{split} ({fact['file']}): {fact['lines']:,} lines, {words:,} words with one end of line "
                f"each, {fact['subwords']:,} subwords; <unk> {fact['unk']:,} times, @-@ {fact['hyphen']:,} "
                f"times{warning}"
            )
        return {"dictionary": files.order, "splits": facts}

    def finish(new: Path, counts: dict[str, Symbols]) -> None:
        for name in (ENCODER, VOCAB):
            shutil.copyfile(bpe / name, new / name)
        facts: Values = {"licence": data.licence, "sources": job.store.origins}
        facts.update(read_step_records(job.root)["bpe"]["facts"])
        if "srcdict" in job.settings["flags"]:
            facts["dictionary"] = OTHER_DICTIONARY
        write_json(new / MANIFEST, {"recipe": data.name} | facts | {"symbols": symbols_of(counts)})
        log.info("dictionary: %s", DICTIONARIES[facts["dictionary"]])

    encoded = Step("bpe", bpe, encode, read)
    return [encoded, job.binarise(encoded, list(job.parts or job.subsets), finish=finish)]
