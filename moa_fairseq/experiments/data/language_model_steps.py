"""The steps of running text, for causal and for masked language models."""

import dataclasses
import functools
import itertools
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_fairseq.experiments.data import monolingual, pieces
from moa_fairseq.experiments.data.binarised import DICTIONARY
from moa_fairseq.experiments.data.catalogue import SENTENCEPIECE
from moa_fairseq.experiments.data.gpt2_files import (
    DICTIONARIES,
    ENCODER,
    OTHER_DICTIONARY,
    VOCAB,
    Gpt2Files,
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


class LanguageModelPreparation:
    """The steps of text with a vocabulary of its own: (model →) text (→ binarised) → manifest.

    Args:
        job: the data section of the recipe, and the files of the data set.
    """

    def __init__(self, job: PreparationJob):
        data = job.data
        settings = job.settings
        self.job = job
        self.data = data
        self.model = job.root / "model"
        self.num_pieces = settings.get("bpe") or data.pieces
        defaults = pieces.RELEASED if data.released_pieces else pieces.LANGUAGE_MODEL
        self.piece_settings = dict(defaults)
        if settings.get("character_coverage"):
            self.piece_settings["character_coverage"] = settings["character_coverage"]
        self.max_tokens = dict(data.tokens)  # split → number; {} for the whole text
        if settings.get("tokens"):
            self.max_tokens["train"] = settings["tokens"]
        self.is_announced = False

    def steps(self) -> list[Step]:
        """All steps in their order, the manifest included."""
        used = self._part_checksums
        model = None
        if self.data.encoder == SENTENCEPIECE:
            model = Step("model", self.model, self.learn_pieces, self._model_inputs, used=used)
        inputs = functools.partial(self._text_inputs, model)
        text = Step("text", self.job.root / "text", self.write_text, inputs, used=used)
        steps = [model, text] if model else [text]
        if self.data.encoder != "none":
            steps.append(self.job.binarise(text, self.data.subsets))
        settings = {"tokens": self.max_tokens} if self.max_tokens else {}
        return [*steps, self.job.manifest(steps[-1], **settings)]

    def learn_pieces(self, new: Path) -> Values:
        """Learn the SentencePiece model. Returns its facts and settings."""
        log.info(f"learning {self.num_pieces:,} SentencePiece pieces")
        data = self.data
        job = self.job
        facts: Values = {"settings": self.piece_settings}
        if self.max_tokens:
            self._announce()
            parts = job.parts["train"][: data.learn_on]
            texts = list(map(job.text_file, parts))
            facts["train"] = {"files": {part.name: job.part_checksum(part) for part in parts}}
        else:
            texts = job.texts["train"]
        counts = pieces.learn(
            itertools.chain.from_iterable(text.lines() for text in texts),
            texts[0].path,
            self.num_pieces,
            new / pieces.MODEL,
            released=data.released_pieces,
            fixed=not data.bring,
            **self.piece_settings,
        )
        if counts["left_out"]:
            log.warning(
                f"SentencePiece did not learn from {counts['left_out']:,} of {counts['lines']:,} lines, "
                f"which have more than {pieces.LONGEST:,} bytes: SwitchHead's release does the same "
                "(docs/defaults.md)"
            )
        return facts | counts

    def write_text(self, new: Path) -> Values:
        """Write the text of each split in symbols."""
        job = self.job
        if self.data.encoder == "bytes":
            facts = monolingual.write_bytes(job.texts, self.data.byte_splits, new)
        elif self.max_tokens:
            facts = self._write_first_tokens(new)
        elif self.data.encoder == SENTENCEPIECE:
            facts = monolingual.write_pieces(job.texts, self.model / pieces.MODEL, new, job.workers)
        else:
            facts = monolingual.write_lines(job.texts, new)
        for split, fact in facts.items():
            units = ("lines", "tokens", "bytes", "parts")
            counts = [f"{fact[unit]:,} {unit}" for unit in units if unit in fact]
            if "longest" in fact:
                counts.append(f"the longest line has {fact['longest']:,} bytes")
            log.info(f"{split}: {', '.join(counts)}")
        return facts

    def _write_first_tokens(self, new: Path) -> Values:
        """Write the first tokens of each split, as many as are requested."""
        self._announce()
        job = self.job
        growing = job.root / "growing"  # survives an interruption, unlike the step's own folder
        facts = {}
        for split, parts in job.parts.items():
            facts[split] = monolingual.grow_pieces(
                parts,
                fetch=job.text_file,
                digest=job.part_checksum,
                model=self.model / pieces.MODEL,
                path=growing / split,
                most=self.max_tokens[split],
                workers=job.workers,
            )
        new.mkdir()
        for split in facts:
            shutil.move(growing / split, new / split)
        shutil.rmtree(growing)
        return facts

    def _announce(self) -> None:
        """Print the terms and the size of the text, and check the disk, unless done before."""
        if not self.is_announced:
            before_growth(self.data, self.job.store, sum(self.max_tokens.values()), self.job.root)
        self.is_announced = True

    def _model_inputs(self) -> Values:
        """What the SentencePiece model depends on."""
        inputs = self._source_inputs() | {"pieces": self.num_pieces}
        # Older versions did not count the settings of released pieces as an input
        if not self.data.released_pieces:
            inputs["settings"] = self.piece_settings
        return inputs

    def _text_inputs(self, model: Step | None) -> Values:
        """What the text depends on, among it the SentencePiece model if there is one."""
        inputs = self._source_inputs()
        if model:
            inputs["model"] = model
        if self.max_tokens:
            inputs["tokens"] = self.max_tokens
        return inputs

    def _source_inputs(self) -> Values:
        """The encoder and the files of the text; see `_part_checksums` for files fetched only if needed."""
        inputs: Values = {"encoder": self.data.encoder}
        if self.max_tokens:
            return inputs | {"files": self.data.name}
        texts = self.job.text_inputs()
        return inputs | {"texts": texts, "splits": dict(self.data.byte_splits)}

    def _part_checksums(self, facts: Mapping[str, Any] | None, recompute: bool) -> Values:
        """The checksums of the parts that a step read, if some tokens alone are used.

        Args:
            facts: the facts of the step, None before its first run.
            recompute: True to compute the checksums again; a part that was deleted counts as unchanged.
        """
        content: Values = {}
        if not facts or not self.max_tokens:
            return content
        for split, parts in self.job.parts.items():
            recorded = facts.get(split, {}).get("files", {})  # none by an older version
            checksums = {}
            for part in parts:
                if part.name in recorded:
                    current = self.job.part_checksum(part) if recompute else None
                    checksums[part.name] = current or recorded[part.name]
            if checksums:
                content[f"content of {split}"] = checksums
        return content


@dataclasses.dataclass
class MaskedLMPreparation:
    """The steps of text in GPT-2's encoding: bpe → binarised, whose folder also has the manifest.

    Args:
        job: the data section of the recipe, and the files of the data set.
    """

    job: PreparationJob

    @functools.cached_property
    def gpt2(self) -> Gpt2Files:
        """The files of the encoding, fetched if necessary."""
        folders = [self.job.source] if self.job.source else []
        return obtain_gpt2_files(folders, offline=self.job.offline)

    def steps(self) -> list[Step]:
        """Both steps in their order."""
        bpe = Step("bpe", self.job.root / "bpe", self.encode, self._inputs)
        splits = list(self.job.parts or self.job.subsets)
        return [bpe, self.job.binarise(bpe, splits, finish=self.write_manifest)]

    def encode(self, new: Path) -> Values:
        """Write the ids of each split, next to the files of the encoding."""
        texts = {split: file.path for split, (file,) in self.job.texts.items()}
        facts = encode_texts(texts, new, self.gpt2, self.job.workers)
        shutil.copyfile(self.gpt2.encoder, new / ENCODER)
        shutil.copyfile(self.gpt2.vocab, new / VOCAB)
        shutil.copyfile(self.gpt2.dictionary, new / DICTIONARY)
        for split, fact in facts.items():
            words = fact["words"] + fact["lines"]  # the end of each line counts as a word
            expected = self.job.data.words.get(split, words)
            log.info(
                f"{split} ({fact['file']}): {fact['lines']:,} lines, {words:,} words with one end of line "
                f"each, {fact['subwords']:,} subwords; <unk> {fact['unk']:,} times, @-@ {fact['hyphen']:,} "
                "times"
            )
            if words != expected:
                log.warning(f"{split} has {words:,} words, but {expected:,} words were expected")
        return {"dictionary": self.gpt2.order, "splits": facts}

    def write_manifest(self, new: Path, counts: Mapping[str, Symbols]) -> None:
        """Add manifest.json and the files of the encoding to the binarised folder."""
        job = self.job
        for name in (ENCODER, VOCAB):
            shutil.copyfile(job.root / "bpe" / name, new / name)
        manifest: Values = {"recipe": job.data.name, "licence": job.data.licence}
        manifest["sources"] = job.store.origins
        manifest |= read_step_records(job.root)["bpe"]["facts"]
        if "srcdict" in job.settings["flags"]:
            manifest["dictionary"] = OTHER_DICTIONARY
        write_json(new / MANIFEST, manifest | {"symbols": symbols_of(counts)})
        log.info(f"dictionary: {DICTIONARIES[manifest['dictionary']]}")

    def _inputs(self) -> Values:
        """What the encoded text depends on."""
        dictionary = self.job.checksum(self.gpt2.dictionary)
        order = self.gpt2.order
        return {"texts": self.job.text_inputs(), "dictionary": dictionary, "order": order}
