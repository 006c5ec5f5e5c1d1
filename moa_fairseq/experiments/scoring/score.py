"""BLEU of a fairseq-generate log, or of plain text files, by every chain that the papers use; perplexity
of a masked language model; accuracy of a classifier.

  moa-fairseq score generate-test.txt                      # or a run folder
  moa-fairseq score --hypothesis out.tok.de --reference test.tok.de [--reference second.tok.de]
  moa-fairseq score --hypothesis outputs.tar.xz/L-seed1.test.txt --reference test.de        in an archive
  moa-fairseq score moa-seed1.txt moa-seed2.txt --against dense-seed1.txt dense-seed2.txt
  moa-fairseq score --masked-lm average.pt --data data/wikitext103/binarised
  moa-fairseq score --classifier checkpoint_best.pt --data data/listops/binarised

Without --chain three numbers are printed, each with its chain:

  multi-bleu      Moses' multi-bleu.perl on the tokens: the number of most papers before 2018. Where the
                  text was tokenised with split hyphens (`tokenizer.perl -a`: MoA's WMT14 recipes), plain
                  multi-bleu IS the score after one compound split
  compound-split  the same after splitting hyphens, as fairseq's compound_split_bleu.sh does. It is
                  INFLATED (by about 0.7 to 1 BLEU for German): compare it only with its like. Text
                  with hyphens that are split already has its ` @-@ ` split once more
  sacrebleu       detokenised, cased, with its signature: the number to publish. Its tokeniser is
                  sacreBLEU's for the language: 13a, zh, ja-mecab, ko-mecab; for Thai, Khmer, Burmese, Lao
                  and Cantonese flores200 where its model is at hand, else char. A reference word that
                  stands as <<unk>> in a log counts as one word that never matches. Lower-cased tokens
                  are scored as they are (case:lc, tok:none): a multi-bleu with a signature

On request (--chain for these alone, --also beside the three; both can be repeated):

  get-ende-bleu   tensor2tensor's script: the hypotheses (only) are tokenised for German once more,
                  hyphens are split in both. Hypotheses should be running text, references tokenised
  moa-release     the script of MoA's release: it splits hyphens that are already ` @-@ ` a second time,
                  which adds about 0.9 BLEU for German and 0.8 for French. For comparison with that
                  release and nothing else; MoA's WMT14 recipes print it beside multi-bleu

--against compares two systems by sacreBLEU's BLEU and chrF: means over the seeds, their difference, and two
two-sided p. "p, sentences" is approximate randomisation: in each of 10,000 trials the outputs of every
sentence are dealt anew to the two systems. It covers the choice of sentences, not the luck of a training.
"p, seeds" covers that, with an interval: a t test of the pairs of outputs in the order given, the first with
the first; each system needs two or more, and as many as the other.

fairseq's own fairseq-score uses the formula of multi-bleu.perl; it differs only in counting any
Unicode white space (a no-break space, say) as a word boundary, an empty line as one token, and in
never matching <unk>. The scores here are multi-bleu.perl's on both chains.

A masked language model (--masked-lm) guesses the tokens that a masking of the subset hides; --maskings
maskings, of successive seeds, are averaged and given with their standard deviation. The masking is that of
training (--mask-prob and so on stand in the checkpoint), fixed by seed and place in the data:

  masked_lm_ppl       e^(mean negative log-likelihood in nats) = 2^(fairseq's loss) of all masked positions,
                      <s> at the start of a sample and </s> at the ends of lines among them: what fairseq's
                      own validation prints as ppl, and what is compared with the papers
  masked_lm_text_ppl  the same without <s> and </s>, which are nearly always guessed
  masked_lm_word_ppl  word level: the mean of a subword, times the number of subwords (</s> included), over
                      the number of white-space words plus one end of line each. For a masked model this is
                      a convention, no likelihood of the text: it makes different subwords comparable, and
                      it is not comparable with a left-to-right model's perplexity

The text is scored as it stands in the files: WikiText's `@-@`, `@,@` and `@.@` are words like any other.
The same holds for `<unk>` of its .tokens files (three subwords that are easy to guess: prefer the .raw
files, which have none). How often both occur is counted when the text is prepared, and stands in --json.

A classifier of sentences (--classifier) is scored by its accuracy in percent, as a whole and for each
column of DIR/groups/SUBSET.tsv, where the data has such a file: ListOps' tells dependency depth, depth
and length of each expression.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moa_fairseq.errors import UserError, printable
from moa_fairseq.experiments.data.parallel_text import hyphens
from moa_fairseq.experiments.scoring import classification, masked_lm
from moa_fairseq.experiments.scoring.against import against, interval_of
from moa_fairseq.experiments.scoring.chains import (
    CHAINS,
    DEFAULT_CHAINS,
    KEYS,
    SACREBLEU,
    TOKENIZERS,
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
from moa_fairseq.experiments.scoring.text_marks import (
    RUNNING,
    lacks_spaces,
    score_warnings,
    subword_kind,
)
from moa_fairseq.experiments.tables import Column, Table, values_of
from moa_fairseq.text.subwords import join_subwords

_GERMAN = "does not name its language, so German is assumed: say --target-lang"
SUBWORDS = ("auto", "none", "subword_nmt", "sentencepiece")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq score`."""
    add = parser.add_argument
    chains = list(KEYS)
    repeated = "can be repeated"
    add(
        "log",
        nargs="*",
        metavar="GENERATE_OUTPUT",
        help="what fairseq-generate printed, or a run folder",
    )
    text = "instead of a log: one translation per line"
    add("--hypothesis", nargs="+", default=[], metavar="FILE", help=text)
    text = "another system's output of the same sentences, a file for each seed: is the difference real?"
    add("--against", nargs="+", metavar="FILE", help=text)
    text = f"the hypothesis's reference; {repeated}"
    add("--reference", metavar="FILE", action="append", default=[], help=text)
    add("--chain", action="append", choices=chains, help=f"only this chain; {repeated}")
    add("--also", action="append", default=[], choices=chains, help=f"a further chain; {repeated}")
    text = "the text's language (default: the log's, or that of recipe.yaml beside it, else de)"
    add("--target-lang", metavar="LANG", help=text)
    text = "default: what sacreBLEU takes for the language"
    add("--sacrebleu-tokenizer", choices=TOKENIZERS, help=text)
    text = "untokenised reference for sacreBLEU, one line per sentence"
    add("--raw-reference", metavar="FILE", help=text)
    text = "the texts are running text: sacreBLEU takes them as given"
    add("--detokenized", action="store_true", help=text)
    text = "join subwords first; auto looks for the marks (@@ or ▁) on each side separately (default: auto "
    add("--remove-bpe", choices=SUBWORDS, help=text + "for a log, none for files)")
    add("--lowercase", action="store_true", help="multi-bleu.perl -lc; sacreBLEU is cased")
    add(
        "--allow-partial",
        action="store_true",
        help="score a log that was cut short or lacks sentences",
    )
    add("--json", action="store_true", help="print one JSON object")
    # Models are scored straight from a checkpoint.
    add = parser.add_argument_group("models").add_argument
    add("--masked-lm", type=Path, metavar="CHECKPOINT", help="score this masked language model")
    add("--classifier", type=Path, metavar="CHECKPOINT", help="score this classifier")
    add("--data", type=Path, metavar="DIR", help="binarised text (default: what it was trained on)")
    add("--subset", default="test", help="default: %(default)s")
    add("--max-tokens", type=int, default=4096, metavar="N", help="tokens at once (default: 4096)")
    add("--cpu", action="store_true", help="do not use a GPU")
    text = (
        "of --masked-lm: how the text is cut (default: as in training); none cuts long lines to fit"
    )
    add("--sample-break-mode", choices=["none", "complete", "complete_doc", "eos"], help=text)
    text = "of --masked-lm: how many are averaged (default: %(default)s)"
    add("--maskings", type=int, default=5, metavar="N", help=text)
    text = "of --masked-lm: seeds S, S+1, ... (default: %(default)s)"
    add("--mask-seed", type=int, default=1, metavar="S", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the requested scores, and return the exit status."""
    if args.masked_lm or args.classifier:
        return _score_model(args)
    if bool(args.log) == bool(args.hypothesis) or bool(args.hypothesis) != bool(args.reference):
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
        return _compare([ours, theirs], args.json)
    if len(paths) > 1:
        raise UserError(
            f"{len(paths)} outputs: give one, or one for each seed and --against others."
        )
    texts, meta = read(paths[0], args)
    return _score_texts(texts, meta, args)


def _score_model(args: argparse.Namespace) -> int:
    """Score the checkpoint of --masked-lm or --classifier."""
    flag = "--masked-lm" if args.masked_lm else "--classifier"
    if args.log or args.hypothesis or args.reference or (args.masked_lm and args.classifier):
        raise UserError(
            f"{flag} scores one checkpoint: leave out GENERATE_OUTPUT, --hypothesis, --reference and "
            "other models."
        )
    return (masked_lm if args.masked_lm else classification).run(args)


def _score_texts(texts: Texts, meta: dict[str, Any], args: argparse.Namespace) -> int:
    """Score by each chain, and print the scores; warnings and the counts behind them go into `meta`."""
    chains = list(dict.fromkeys([*(args.chain or DEFAULT_CHAINS), *args.also]))
    scores = {KEYS[name]: score(name, texts, args.lowercase) for name in chains}
    references = list(itertools.chain.from_iterable(texts.references))
    meta["warnings"] += _form_warnings(texts, references, chains)
    words = [len(line.split()) for line in references if line.strip()]
    meta["without_spaces"] = lacks_spaces(meta.pop("known_lang"), sum(words), len(words))
    by_words = []
    for name in chains:
        if name != SACREBLEU or "tok:13a" in scores[KEYS[name]]["signature"]:
            by_words.append(name)
    if meta["without_spaces"] and by_words:
        meta["warnings"].append(
            f"{', '.join(by_words)}: spaces do not part the words of the references, so n-grams of words say "
            "nothing: use sacrebleu with the target's --target-lang, or --sacrebleu-tokenizer char"
        )
    meta["warnings"] += [values["warning"] for values in scores.values() if "warning" in values]
    meta["hyphens"] = {"hypotheses": hyphens(texts.hypotheses), "references": hyphens(references)}
    if "compound-split" in chains and any(" @-@ " in line for line in texts.hypotheses):
        meta["warnings"].append(
            "compound-split: the text was tokenised with hyphens split (@-@); fairseq's script splits them "
            "again, so each counts as three matching tokens"
        )
    _warn(meta["warnings"])
    if args.json:
        print(json.dumps(scores | {"meta": meta}, indent=2, ensure_ascii=False))
        return 0
    for name in chains:
        result = scores[KEYS[name]]
        chain = result["chain"]
        if "signature" in result:
            chain += f", {result['signature']}"
        print(f"{name:<15} {result['line']}  [{chain}]")
    return 0


def _form_warnings(texts: Texts, references: list[str], chains: list[str]) -> list[str]:
    """Warnings about text that is not in the form that a chain needs."""
    form = RUNNING if texts.detokenized else ""
    wants = {}
    for name in chains:
        wants[name] = (form, form) if name == SACREBLEU else CHAINS[name].wants
    return score_warnings(wants, {"hypotheses": texts.hypotheses, "references": references})


def _warn(warnings: Iterable[str]) -> None:
    """Print warnings to standard error."""
    for warning in warnings:
        print(printable(f"moa-fairseq score: warning: {warning}"), file=sys.stderr)


def _compare(systems: list[list[tuple[Texts, dict[str, Any]]]], as_json: bool) -> int:
    """Compare two systems, each with a list of the outputs that `_from_log` or `_from_files` returned."""
    running = []
    for outputs in systems:
        for _, meta in outputs:
            _warn(meta["warnings"])
        running.append([running_text(texts) for texts, _ in outputs])
    first, second = running
    _warn(dict.fromkeys(text.warning for text in (*first, *second) if text.warning))
    content = against(first, second)
    if as_json:
        print(json.dumps(content, indent=2))
        return 0
    columns = [Column("metric", "metric"), Column("first", "first", ".2f")]
    columns += [Column("second", "second", ".2f"), Column("difference", "first − second", "+.2f")]
    columns += [Column("p", "p, sentences", ".4f"), Column("interval", "95 %, seeds", ">")]
    columns += [Column("p_seeds", "p, seeds", ".4f")]
    rows = [dict(row, interval=interval_of(row)) for row in content["metrics"]]
    print(Table(columns, rows).text())
    print(*values_of(content["metrics"], "signature"), sep="\n")
    print(
        f"{content['sentences']} sentences, {len(first)} and {len(second)} outputs; {first[0].chain}"
    )
    return 0


def _from_log(path: str, args: argparse.Namespace) -> tuple[Texts, dict[str, Any]]:
    """The texts of a log, and facts about them for --json."""
    file, language = beside_recipe(path)
    path = str(file)
    log = read_generate_log(file, args.allow_partial)
    language = args.target_lang or log.target_lang or language
    joining = args.remove_bpe or "auto"
    joined, kind = _joined(log.hypotheses, joining)
    targets, target_kind = _joined(log.targets, joining)
    # fairseq applies --bpe and --tokenizer to T and D, not to H: then D must be compared with T
    decoded = log.decoded != log.hypotheses
    hypotheses = log.decoded if decoded else joined
    raw = None
    if args.raw_reference:
        lines = read_lines(args.raw_reference)
        if log.ids[-1] >= len(lines):
            raise UserError(
                f"{args.raw_reference} has {len(lines)} lines, but {path} translates sentence number "
                f"{log.ids[-1]} (from 0): it is not the reference of this test set."
            )
        raw = [[lines[i] for i in log.ids]]
    warnings = _log_warnings(path, log, args.allow_partial)
    if not language:
        warnings.append(f"{path} {_GERMAN}")
    meta: dict[str, Any] = {
        "input": str(path),
        "lines": len(log.ids),
        "hypothesis_lines": "D" if decoded else "H",
        "subwords_joined": {"hypotheses": kind, "references": [target_kind]},
        "target_lang": language or "de",
        "known_lang": language,
        "complete": log.complete,
        "warnings": warnings,
    }
    running = args.detokenized or (decoded and log.decoded != joined)
    # fairseq's marks of unknown words become characters without a meaning in Unicode, which no tokeniser
    # splits and which match nothing: multi-bleu.perl counts <<unk>> as one word, but sacreBLEU as five
    hypotheses = [line.replace("<unk>", "\ufdd1") for line in hypotheses]
    references = [[line.replace("<<unk>>", "\ufdd0") for line in targets]]
    lang = meta["target_lang"]
    tokenizer = args.sacrebleu_tokenizer
    return Texts(hypotheses, references, lang, running, raw, tokenizer), meta


def _log_warnings(path: str, log: GenerateLog, allow_partial: bool) -> list[str]:
    """Warnings about a log; a UserError if sentences are missing and this is not allowed."""
    warnings = []
    if unknown := sum(line.count("<<unk>>") for line in log.targets):
        warnings.append(
            f"{path}: {unknown} reference words are unknown to the dictionary and appear as <<unk>>: each "
            "counts as one word that never matches; to be exact, score text files with --hypothesis and "
            "--reference"
        )
    if skipped := log.ids[-1] + 1 - len(log.ids):
        number = "1 sentence of the test set is"
        if skipped > 1:
            number = f"{skipped} sentences of the test set are"
        problem = (
            f"{path}: {number} missing. fairseq leaves out "
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
            f"{path} is incomplete: this is the score of its first {len(log.ids)} sentences"
        )
    return warnings


def _from_files(path: str, args: argparse.Namespace) -> tuple[Texts, dict[str, Any]]:
    """The texts of --hypothesis and --reference, and facts about them for --json."""
    raws = [args.raw_reference] if args.raw_reference else []
    texts = {file: read_lines(file) for file in (path, *args.reference, *raws)}
    hypotheses = texts[path]
    joining = args.remove_bpe or "none"
    for file, lines in texts.items():
        if not "".join(lines).strip():
            raise UserError(f"{file} is empty: there is nothing to score.")
        if len(lines) != len(hypotheses):
            raise UserError(
                f"{path} has {len(hypotheses)} lines, {file} has {len(lines)}: a score needs the same "
                f"sentences in the same order. Check that both files are complete."
            )
    joined, kind = _joined(hypotheses, joining)
    language = args.target_lang or beside_recipe(path)[1]
    references, reference_kinds = zip(*(_joined(texts[file], joining) for file in args.reference))
    meta: dict[str, Any] = {
        "input": str(path),
        "references": list(map(str, args.reference)),
        "lines": len(hypotheses),
        "subwords_joined": {"hypotheses": kind, "references": list(reference_kinds)},
        "target_lang": language or "de",
        "known_lang": language,
        "warnings": [] if language else [f"{path} {_GERMAN}"],
    }
    raw = [texts[file] for file in raws] or None
    lang = meta["target_lang"]
    tokenizer = args.sacrebleu_tokenizer
    return Texts(joined, list(references), lang, args.detokenized, raw, tokenizer), meta


def _joined(lines: list[str], requested: str) -> tuple[list[str], str]:
    """Lines with their subwords joined, and the kind of subwords; "auto" recognises it by its marks."""
    kind = subword_kind(lines) if requested == "auto" else requested
    return [join_subwords(line, kind) for line in lines], kind
