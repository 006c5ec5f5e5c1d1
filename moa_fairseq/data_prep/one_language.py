"""Text in one language, in a vocabulary of its own or in GPT-2's, and sentences with a class each."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional

from moa_fairseq.data_prep import inputs, monolingual
from moa_fairseq.data_prep.binarised import DICTIONARY, INPUT, LABEL, Prepared
from moa_fairseq.data_prep.catalogue import Dataset
from moa_fairseq.data_prep.gpt2_files import ENCODER, NUMERIC_ORDER, ROBERTA_ORDER, VOCAB, obtain_gpt2_files
from moa_fairseq.data_prep.listops import DIGITS, GROUPS, SYMBOLS, ListOps, write_split
from moa_fairseq.data_prep.manifest import MANIFEST, write_manifest
from moa_fairseq.data_prep.obtain import Store
from moa_fairseq.data_prep.stage_folder import fingerprint_of
from moa_fairseq.files import atomic_write
from moa_fairseq.json_files import write_json

if TYPE_CHECKING:
    from moa_fairseq.data_prep.prepare import Preparation

OTHER_DICTIONARY = "data.flags.srcdict"
# What manifest.json calls the dictionary of GPT-2's encoding, in words.
DICTIONARIES = {
    ROBERTA_ORDER: "RoBERTa's",
    NUMERIC_ORDER: "RoBERTa's entries in the order of their ids, as RoBERTa's own was not at hand",
    OTHER_DICTIONARY: "as data.flags.srcdict says (null: of the training text)",
}
log = logging.getLogger(__name__)


def language_modeling(job: Preparation, dataset: Dataset, store: Store) -> Prepared:
    """Carry out the stages of text in a vocabulary of its own: (model →) text (→ binarised)."""
    memory, pieces = job.memory(), store.pieces(dataset.parts(), (), dataset, job.root)
    texts = {split: [pieces[part] for part in rows] for split, rows in dataset.splits.items()}
    digests = {split: [memory.checksum(piece.path) for piece in rows] for split, rows in texts.items()}
    mark = fingerprint_of("monolingual", 1, dataset.encoder, digests, dict(dataset.byte_splits))
    if dataset.encoder == "sentencepiece":
        mark = fingerprint_of(mark, dataset.pieces)

        def learn(new: Path) -> Dict[str, int]:
            log.info(f"learning {dataset.pieces:,} SentencePiece pieces")
            return monolingual.train_pieces(texts["train"], dataset.pieces, new)

        job.stage("model", mark, learn)

    def build(new: Path) -> Dict[str, Any]:
        if dataset.encoder == "bytes":
            return monolingual.write_bytes(texts, dataset.byte_splits, new)
        if dataset.encoder == "sentencepiece":
            model = job.root / "model" / monolingual.MODEL
            return monolingual.write_pieces(texts, model, new, job.workers)
        return monolingual.write_lines(texts, new)

    for split, fact in job.stage("text", mark, build).items():
        log.info(f"{split}: " + ", ".join(f"{number:,} {what}" for what, number in fact.items()))
    prepared = Prepared(job.root / "text", {}, mark)
    if dataset.encoder != "none":
        mark = fingerprint_of("binarised", 2, dict(dataset.preprocess), mark)
        prepared = job.binarise(dataset, dataset.subsets, mark)
    write_manifest(job.root, {"recipe": dataset.name}, store.origins, texts, dataset)
    return prepared


def masked_lm(job: Preparation, dataset: Dataset, store: Store) -> Prepared:
    """Carry out the stages of running text in GPT-2's encoding: bpe → binarised."""
    facts: Dict[str, Any] = {"licence": dataset.licence if dataset.downloadable else ""}
    if not dataset.downloadable:
        inputs.require_source(job.settings, job.source)
    if job.source and (not dataset.downloadable or inputs.has_text(job.source, dataset)):
        texts = inputs.find_text(job.source, dataset, job.subsets, job.root / "text")
    else:
        pieces = store.pieces(dataset.parts(), (), dataset, job.root)
        texts = {split: piece.path for split, piece in zip(dataset.splits, pieces.values())}
        facts["sources"] = store.origins
    files, memory = obtain_gpt2_files([job.source] if job.source else [], offline=job.offline), job.memory()
    pinned = {
        "dictionary": {files.dictionary.name: memory.checksum(files.dictionary)},
        "order": files.order,
    }
    digests = {path.name: memory.checksum(path) for path in texts.values()}
    mark = fingerprint_of("gpt2-bpe", 1, digests, pinned)

    def encode(new: Path) -> Dict[str, Any]:
        # Imported late: a second run that has nothing to do should not wait for it.
        from moa_fairseq.data_prep.gpt2_bpe import encode_texts

        splits = encode_texts(texts, new, files, job.workers)
        for path, name in ((files.encoder, ENCODER), (files.vocab, VOCAB), (files.dictionary, DICTIONARY)):
            shutil.copyfile(path, new / name)
        for split, fact in splits.items():
            log.info(_describe(split, fact, dataset.words.get(split)))
        return {"dictionary": files.order, "splits": splits}

    facts.update(job.stage("bpe", mark, encode, resumable=True))
    extra = job.settings["flags"]
    if "srcdict" in extra:
        facts["dictionary"] = OTHER_DICTIONARY

    def finish(new: Path) -> None:
        for name in (ENCODER, VOCAB):
            shutil.copyfile(job.root / "bpe" / name, new / name)
        write_json(new / MANIFEST, {"recipe": dataset.name, **facts})

    mark = fingerprint_of("binarised-text", 1, extra, mark)
    prepared = job.binarise(dataset, list(facts["splits"]), mark, finish)
    log.info(f"dictionary: {DICTIONARIES[facts['dictionary']]}")
    return prepared


def _describe(split: str, facts: Mapping[str, Any], expected: Optional[int]) -> str:
    """One line of counts, with a warning where they are not those of the published text."""
    words, unk, hyphen = facts["words"] + facts["lines"], facts["unk"], facts["hyphen"]
    warning = f"; WARNING: {expected:,} words were expected" if expected not in (None, words) else ""
    return (
        f"{split} ({facts['file']}): {facts['lines']:,} lines, {words:,} words with one end of line each, "
        f"{facts['subwords']:,} subwords; <unk> {unk:,} times, @-@ {hyphen:,} times{warning}"
    )


def classification(job: Preparation, dataset: Dataset, store: Store) -> Prepared:
    """Carry out the stages of sentences that are drawn by a seed: text → binarised."""
    settings = dict(dataset.generated)
    mark = fingerprint_of("listops", 1, settings)

    def draw(new: Path) -> Dict[str, Any]:
        log.info(f"drawing {sum(settings['sizes'].values()):,} expressions by seed {settings['seed']}")
        for name, symbols in ((INPUT, SYMBOLS), (LABEL, DIGITS)):
            with atomic_write(new / name / DICTIONARY) as stream:
                stream.writelines(f"{symbol} 1\n" for symbol in symbols)
        splits = ListOps(**settings).splits(job.workers)
        return {split: write_split(new, split, found) for split, found in splits.items()}

    for split, fact in job.stage("text", mark, draw).items():
        log.info(f"{split}: {fact['lines']:,} expressions, {fact['tokens']:,} tokens")
    groups = job.root / "text" / GROUPS
    mark = fingerprint_of("binarised", 1, mark)
    prepared = job.binarise(dataset, dataset.subsets, mark, lambda new: shutil.copytree(groups, new / GROUPS))
    write_manifest(job.root, {"recipe": dataset.name, "generated": settings}, {}, {}, dataset)
    return prepared
