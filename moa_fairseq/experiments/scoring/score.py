"""BLEU of translations, perplexity of a masked language model, accuracy of a classifier.

  moa-fairseq score generate-test.txt                      # or a run folder
  moa-fairseq score --hypothesis out.tok.de --reference test.tok.de [--reference second.tok.de]
  moa-fairseq score --hypothesis outputs.tar.xz/L-seed1.test.txt --reference test.de        in an archive
  moa-fairseq score moa-seed1.txt moa-seed2.txt --against dense-seed1.txt dense-seed2.txt
  moa-fairseq score --masked-lm average.pt --data data/wikitext103/binarised
  moa-fairseq score --classifier checkpoint_best.pt --data data/listops/binarised

Without --chain, BLEU is printed by the first three of these chains; --chain prints only the named
ones, --also prints more (both repeatable):

  multi-bleu      Moses' multi-bleu.perl on the tokens: the number of most papers before 2018. Where the
                  text was tokenised with split hyphens (`tokenizer.perl -a`: MoA's WMT14 recipes), plain
                  multi-bleu IS the score after one compound split
  compound-split  the same after splitting hyphens, as fairseq's compound_split_bleu.sh does: INFLATED, by
                  0.7 to 1 BLEU for German. A hyphen that is already ` @-@ ` is split once more
  sacrebleu       detokenised, cased, with its signature: the number to publish. The tokeniser is sacreBLEU's
                  for the language, and char for others without spaces. Lower-cased tokens are scored as
                  they are (case:lc, tok:none)
  get-ende-bleu   tensor2tensor's script: hyphens are split, and the hypotheses, which should be running
                  text, are tokenised for German
  moa-release     the script of MoA's release, which splits ` @-@ ` a second time: about 0.9 BLEU more for
                  German, 0.8 for French. Comparable with that release only

--against compares two systems by BLEU and chrF, with two two-sided p: "p, sentences" by approximate
randomisation of the sentences (10,000 trials), "p, seeds" by a t test of the outputs in pairs, in the order
given; only the latter covers the luck of a training.

--masked-lm hides tokens as in training, --maskings times, and prints mean and standard deviation of:

  masked_lm_ppl       e^(mean negative log-likelihood in nats) of all masked tokens, <s> and </s> among
                      them: the ppl of fairseq's validation and of the papers
  masked_lm_text_ppl  the same without <s> and </s>, which are nearly always guessed
  masked_lm_word_ppl  e^(mean of a subword × subwords ÷ words), where an end of line counts as both: a
                      convention to compare subwords, not comparable with a left-to-right model's perplexity

WikiText's `@-@` and `<unk>` count as words, as they stand in the files: prefer the .raw files, without <unk>.

--classifier prints the accuracy in percent, in all and for each column of DIR/groups/SUBSET.tsv.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError, printable
from moa_fairseq.experiments.data.parallel_text import hyphens
from moa_fairseq.experiments.scoring import classification, masked_lm
from moa_fairseq.experiments.scoring.against import compare_systems, interval_of
from moa_fairseq.experiments.scoring.chains import (
    CHAINS,
    DEFAULT_CHAINS,
    KEYS,
    SACREBLEU,
    Texts,
    running_text,
    score,
)
from moa_fairseq.experiments.scoring.generate_log import (
    GenerateLog,
    beside_recipe,
    read_generate_log,
    read_lines,
)
from moa_fairseq.experiments.scoring.score_flags import add_model_flags, add_text_flags
from moa_fairseq.experiments.scoring.text_marks import (
    RUNNING,
    lacks_spaces,
    score_warnings,
    subword_kind,
)
from moa_fairseq.experiments.tables import Column, Table, terminal_width, values_of
from moa_fairseq.text.subwords import join_subwords

DEFAULT_LANGUAGE = "de"
# In place of fairseq's marks of unknown words: characters without a meaning in Unicode, which no tokeniser
# splits and which match nothing. multi-bleu.perl counts <<unk>> as one word, but sacreBLEU as five
UNKNOWN_IN_HYPOTHESIS = "\ufdd1"
UNKNOWN_IN_REFERENCE = "\ufdd0"


class Output(NamedTuple):
    """A system's output for a test set.

    Args:
        texts: its lines and the references.
        facts: what --json says about the input.
        warnings: what makes a score of these texts doubtful.
        without_spaces: whether no spaces separate the words of the references.
    """

    texts: Texts
    facts: dict[str, Any]
    warnings: list[str]
    without_spaces: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq score`."""
    add_text_flags(parser)
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the requested scores, and return the exit status."""
    if args.masked_lm or args.classifier:
        return _score_model(args)
    gives_log = args.log and not (args.hypothesis or args.reference)
    gives_files = args.hypothesis and args.reference and not args.log
    if not (gives_log or gives_files):
        raise UserError(
            "Give either GENERATE_OUTPUT, or both --hypothesis FILE and --reference FILE, or --masked-lm "
            "CHECKPOINT, or --classifier CHECKPOINT."
        )
    paths = args.log or args.hypothesis
    read = _from_log if args.log else _from_files
    if args.against:
        if args.chain or args.also or args.lowercase:
            raise UserError(
                "--against compares BLEU and chrF: leave --chain, --also and --lowercase out."
            )
        ours = [read(path, args) for path in paths]
        theirs = [read(path, args) for path in args.against]
        return _compare(ours, theirs, args.json)
    if len(paths) > 1:
        raise UserError(
            f"{len(paths)} outputs: give one, or one for each seed and --against others."
        )
    return _score_output(read(paths[0], args), args)


def _score_model(args: argparse.Namespace) -> int:
    """Score the checkpoint of --masked-lm or --classifier."""
    flag = "--masked-lm" if args.masked_lm else "--classifier"
    if args.log or args.hypothesis or args.reference or (args.masked_lm and args.classifier):
        raise UserError(
            f"{flag} scores one checkpoint: leave out GENERATE_OUTPUT, --hypothesis, --reference and "
            "other models."
        )
    module = masked_lm if args.masked_lm else classification
    return module.run(args)


def _score_output(output: Output, args: argparse.Namespace) -> int:
    """Print the scores of one output."""
    chains = dict.fromkeys([*(args.chain or DEFAULT_CHAINS), *args.also])
    scores = {name: score(name, output.texts, args.lowercase) for name in chains}
    warnings = output.warnings + _chain_warnings(output, scores)
    _warn(warnings)
    if args.json:
        content = {KEYS[name]: values for name, values in scores.items()}
        meta = _meta(output, warnings)
        print(json.dumps(content | {"meta": meta}, indent=2, ensure_ascii=False))
        return 0
    for name, values in scores.items():
        signature = f", {values['signature']}" if "signature" in values else ""
        print(f"{name:<15} {values['line']}  [{values['chain']}{signature}]")
    return 0


def _meta(output: Output, warnings: list[str]) -> dict[str, Any]:
    """What --json says about an output, apart from its scores."""
    texts = output.texts
    return output.facts | {
        "target_lang": texts.lang,
        "warnings": warnings,
        "without_spaces": output.without_spaces,
        "hyphens": {
            "hypotheses": hyphens(texts.hypotheses),
            "references": hyphens(itertools.chain(*texts.references)),
        },
    }


def _chain_warnings(output: Output, scores: dict[str, dict[str, Any]]) -> list[str]:
    """Warnings about the texts for which a chain's score misleads."""
    texts = output.texts
    forms = {name: _required_forms(name, texts) for name in scores}
    references = list(itertools.chain(*texts.references))
    warnings = score_warnings(forms, {"hypotheses": texts.hypotheses, "references": references})
    # Chains that count n-grams of words between spaces, as sacreBLEU does by its tokeniser 13a
    word_chains = [
        name for name in scores if name != SACREBLEU or "tok:13a" in scores[name]["signature"]
    ]
    if output.without_spaces and word_chains:
        warnings.append(
            f"{', '.join(word_chains)}: spaces do not part the words of the references, so n-grams of words "
            "say nothing: use sacrebleu with the target's --target-lang, or --sacrebleu-tokenizer char"
        )
    if "compound-split" in scores and any(" @-@ " in line for line in texts.hypotheses):
        warnings.append(
            "compound-split: the text was tokenised with hyphens split (@-@); fairseq's script splits them "
            "again, so each counts as three matching tokens"
        )
    return warnings


def _required_forms(chain: str, texts: Texts) -> tuple[str, str]:
    """The forms that a chain needs of hypotheses and references; "" is any form."""
    if chain != SACREBLEU:
        return CHAINS[chain].wants
    return (RUNNING, RUNNING) if texts.detokenized else ("", "")


def _warn(warnings: Iterable[str]) -> None:
    """Print warnings to standard error."""
    for warning in warnings:
        print(printable(f"moa-fairseq score: warning: {warning}"), file=sys.stderr)


def _compare(ours: list[Output], theirs: list[Output], as_json: bool) -> int:
    """Compare the outputs of two systems."""
    for output in (*ours, *theirs):
        _warn(output.warnings)
    first = [running_text(output.texts) for output in ours]
    second = [running_text(output.texts) for output in theirs]
    content = compare_systems(first, second)
    if as_json:
        print(json.dumps(content, indent=2))
        return 0
    columns = [
        Column("metric", "metric"),
        Column("first", "first", ".2f"),
        Column("second", "second", ".2f"),
        Column("difference", "first − second", "+.2f"),
        Column("p", "p, sentences", ".4f"),
        Column("interval", "95 %, seeds", ">"),
        Column("p_seeds", "p, seeds", ".4f"),
    ]
    rows = [dict(row, interval=interval_of(row)) for row in content["metrics"]]
    print(Table(columns, rows).text(terminal_width()))
    print(*values_of(content["metrics"], "signature"), sep="\n")
    print(
        f"{content['sentences']} sentences, {len(first)} and {len(second)} outputs; {first[0].chain}"
    )
    return 0


def _from_log(path: str, args: argparse.Namespace) -> Output:
    """The output in a log of fairseq-generate."""
    file, recipe_language = beside_recipe(path)
    log = read_generate_log(file, args.allow_partial)
    language = args.target_lang or log.target_lang or recipe_language
    subwords = args.remove_bpe or "auto"
    joined, kind = _joined(log.hypotheses, subwords)
    targets, target_kind = _joined(log.targets, subwords)
    # fairseq applies --bpe and --tokenizer to T and D, not to H: then D must be compared with T
    scored = log.decoded if log.is_decoded else joined
    hypotheses = [line.replace("<unk>", UNKNOWN_IN_HYPOTHESIS) for line in scored]
    references = [line.replace("<<unk>>", UNKNOWN_IN_REFERENCE) for line in targets]
    texts = Texts(
        hypotheses,
        [references],
        lang=language or DEFAULT_LANGUAGE,
        detokenized=args.detokenized or scored != joined,
        raw_references=[_raw_lines(args.raw_reference, file, log)] if args.raw_reference else None,
        tokenizer=args.sacrebleu_tokenizer,
    )
    facts = {
        "input": str(file),
        "lines": len(log.ids),
        "hypothesis_lines": "D" if log.is_decoded else "H",
        "subwords_joined": {"hypotheses": kind, "references": [target_kind]},
        "complete": log.complete,
    }
    warnings = _language_warnings(file, language) + _log_warnings(file, log, args.allow_partial)
    return Output(texts, facts, warnings, _is_without_spaces(texts, language))


def _raw_lines(path: str, log_file: Path, log: GenerateLog) -> list[str]:
    """The lines of an untokenised reference for the sentences of a log."""
    lines = read_lines(path)
    if log.ids[-1] >= len(lines):
        raise UserError(
            f"{path} has {len(lines)} lines, but {log_file} translates sentence number {log.ids[-1]} "
            "(from 0): it is not the reference of this test set."
        )
    return [lines[i] for i in log.ids]


def _language_warnings(path: str | Path, language: str | None) -> list[str]:
    """A warning if the language of a text is unknown."""
    if language:
        return []
    return [f"{path} does not name its language, so German is assumed: say --target-lang"]


def _is_without_spaces(texts: Texts, language: str | None) -> bool:
    """Whether no spaces separate the words of the references; None is an unknown language."""
    lines = [line.split() for line in itertools.chain(*texts.references) if line.strip()]
    return lacks_spaces(language, sum(map(len, lines)), len(lines))


def _log_warnings(path: Path, log: GenerateLog, allow_partial: bool) -> list[str]:
    """Warnings about a log; a UserError if sentences are missing and this is not allowed."""
    warnings = []
    if unknown := sum(line.count("<<unk>>") for line in log.targets):
        warnings.append(
            f"{path}: {unknown} reference words are unknown to the dictionary and appear as <<unk>>: each "
            "counts as one word that never matches; to be exact, score text files with --hypothesis and "
            "--reference"
        )
    translated = len(log.ids)
    missing = log.ids[-1] + 1 - translated  # ids count from 0
    if missing:
        are = "sentence of the test set is" if missing == 1 else "sentences of the test set are"
        problem = (
            f"{path}: {missing} {are} missing. fairseq leaves out "
            "what is longer than the model with --skip-invalid-size-inputs-valid-test, other shards with "
            "--num-shards, and without this plugin a last batch that is not full"
        )
        if not allow_partial:
            raise UserError(
                f"{problem}. Translate all of them, or score these with --allow-partial."
            )
        warnings.append(problem)
    if not log.complete:
        warnings.append(
            f"{path} is incomplete: this is the score of its first {translated} sentences"
        )
    return warnings


def _from_files(path: str, args: argparse.Namespace) -> Output:
    """The output in a file of --hypothesis or --against."""
    files = [path, *args.reference]
    if args.raw_reference:
        files.append(args.raw_reference)
    lines_by_file = {file: read_lines(file) for file in files}
    _check_lines(path, lines_by_file)
    language = args.target_lang or beside_recipe(path)[1]
    subwords = args.remove_bpe or "none"
    hypotheses, kind = _joined(lines_by_file[path], subwords)
    joined = [_joined(lines_by_file[file], subwords) for file in args.reference]
    texts = Texts(
        hypotheses,
        [lines for lines, _ in joined],
        lang=language or DEFAULT_LANGUAGE,
        detokenized=args.detokenized,
        raw_references=[lines_by_file[args.raw_reference]] if args.raw_reference else None,
        tokenizer=args.sacrebleu_tokenizer,
    )
    facts = {
        "input": path,
        "references": args.reference,
        "lines": len(hypotheses),
        "subwords_joined": {"hypotheses": kind, "references": [kind for _, kind in joined]},
    }
    warnings = _language_warnings(path, language)
    return Output(texts, facts, warnings, _is_without_spaces(texts, language))


def _check_lines(path: str, lines_by_file: dict[str, list[str]]) -> None:
    """Raise UserError for an empty file, and for one with more or fewer lines than `path`."""
    expected = len(lines_by_file[path])
    for file, lines in lines_by_file.items():
        if not "".join(lines).strip():
            raise UserError(f"{file} is empty: there is nothing to score.")
        if len(lines) != expected:
            raise UserError(
                f"{path} has {expected} lines, {file} has {len(lines)}: a score needs the same sentences in "
                "the same order. Check that both files are complete."
            )


def _joined(lines: list[str], requested: str) -> tuple[list[str], str]:
    """Lines with their subwords joined, and the kind of subwords; "auto" recognises it by its marks."""
    kind = subword_kind(lines) if requested == "auto" else requested
    return [join_subwords(line, kind) for line in lines], kind
