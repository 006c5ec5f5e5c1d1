"""The steps of running text, for causal and for masked language models."""

from __future__ import annotations

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
from moa_fairseq.experiments.json_files import write_json
from moa_fairseq.experiments.make import Step, marks

log = logging.getLogger(__name__)


def language_modeling_steps(job: PreparationJob) -> list[Step]:
    """Text with a vocabulary of its own: (model →) text (→ binarised)."""
    data = job.data
    folder = job.root / "model"
    steps: list[Step] = []
    learning = pieces.RELEASED if data.released_pieces else pieces.LANGUAGE_MODEL
    count = job.settings.get("bpe") or data.pieces
    most = dict(data.tokens)
    if job.settings.get("tokens"):
        most["train"] = job.settings["tokens"]

    if job.settings.get("character_coverage"):
        learning = {**learning, "character_coverage": job.settings["character_coverage"]}

    def read() -> dict[str, Any]:
        if data.tokens:  # many files, fetched only as needed: see `files`
            return {"encoder": data.encoder, "files": data.name}
        return {"encoder": data.encoder, "texts": job.read(), "splits": dict(data.byte_splits)}

    def files(facts: Mapping[str, Any] | None, anew: bool) -> dict[str, Any]:
        """The content of the files that were read, if they still exist."""
        if not data.tokens:
            return {}
        content = {}
        for split, parts in job.parts.items():
            read = ((facts or {}).get(split) or {}).get("files")
            if read:  # not recorded by an older version
                known = [part for part in parts if part.name in read]
                digests = {part.name: (anew and job.digest(part)) or read[part.name] for part in known}
                content[f"content of {split}"] = digests
        return content

    @functools.cache
    def announce() -> None:
        before_growth(data, job.store, sum(most.values()), job.root)

    def learn(new: Path) -> dict[str, Any]:
        log.info("learning %s SentencePiece pieces", f"{count:,}")
        more: dict[str, Any] = {}
        if data.tokens:
            announce()
            first = job.parts["train"][: data.learn_on]
            texts = [*map(job.piece, first)]
            more["train"] = {"files": {part.name: job.digest(part) for part in first}}
        else:
            texts = job.texts["train"]
        lines = itertools.chain.from_iterable(text.lines() for text in texts)
        facts = pieces.learn(
            *(lines, texts[0].path, count, new / pieces.MODEL, data.released_pieces, not data.bring),
            **learning,
        )
        if facts["left_out"]:
            log.warning(
                "SentencePiece did not learn from %s of %s lines, which have more than %s bytes: "
                "SwitchHead's "
                "release does the same (docs/defaults.md)",
                *(f"{number:,}" for number in (facts["left_out"], facts["lines"], pieces.LONGEST)),
            )
        return {**facts, "settings": learning, **more}

    def grow(new: Path) -> dict[str, Any]:
        announce()
        growing = job.root / "growing"  # survives an interruption, unlike the step's own folder
        facts = {
            split: monolingual.grow_pieces(
                *(parts, job.piece, job.digest, folder / pieces.MODEL, growing / split),
                *(most[split], job.workers),
            )
            for split, parts in job.parts.items()
        }
        new.mkdir()
        for split in facts:
            shutil.move(growing / split, new / split)
        shutil.rmtree(growing)
        return facts

    def write(new: Path) -> dict[str, Any]:
        if data.encoder == "bytes":
            facts = monolingual.write_bytes(job.texts, data.byte_splits, new)
        elif data.tokens:
            facts = grow(new)
        elif data.encoder == "sentencepiece":
            facts = monolingual.write_pieces(job.texts, folder / pieces.MODEL, new, job.workers)
        else:
            facts = monolingual.write_lines(job.texts, new)
        for split, fact in facts.items():
            counts = [
                f"{fact[what]:,} {what}" for what in ("lines", "tokens", "bytes", "parts") if what in fact
            ]
            longest = f", the longest line has {fact['longest']:,} bytes" if "longest" in fact else ""
            log.info("%s: %s%s", split, ", ".join(counts), longest)
        return facts

    if data.encoder == "sentencepiece":
        # For the release's data, older versions did not count its settings as an input.
        more = {} if data.released_pieces else {"settings": learning}
        inputs = {"pieces": count, **more}
        steps.append(Step("model", folder, learn, lambda: {**read(), **inputs}, used=files))
    model: dict[str, Any] = {"model": steps[0]} if steps else {}
    if data.tokens:
        model["tokens"] = most
    steps.append(Step("text", job.root / "text", write, lambda: {**read(), **model}, used=files))
    if data.encoder != "none":
        steps.append(job.binarise(steps[-1], data.subsets))
    return [*steps, job.manifest(steps[-1], **({"tokens": most} if most else {}))]


def masked_lm_steps(job: PreparationJob) -> list[Step]:
    """Running text in GPT-2's encoding: bpe → binarised, whose folder also has the manifest."""
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

    def finish(new: Path, counts: dict[str, Symbols]) -> None:
        for name in (ENCODER, VOCAB):
            shutil.copyfile(bpe / name, new / name)
        facts = {"licence": data.licence, "sources": job.store.origins, **marks(job.root)["bpe"]["facts"]}
        if "srcdict" in job.settings["flags"]:
            facts["dictionary"] = OTHER_DICTIONARY
        write_json(new / MANIFEST, {"recipe": data.name, **facts, "symbols": symbols_of(counts)})
        log.info("dictionary: %s", DICTIONARIES[facts["dictionary"]])

    encoded = Step("bpe", bpe, encode, read)
    return [encoded, job.binarise(encoded, list(job.parts or job.subsets), finish=finish)]
