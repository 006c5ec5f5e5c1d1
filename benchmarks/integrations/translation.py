"""Finished runs in fairseq, in transformers and, dense ones, in CTranslate2: speed on one core, and answers.

    python benchmarks/integrations/translation.py RUN… --source TEST.en --transformers PYTHON

Each system is a process with one thread. All translate the same batches in turn, at the run's beam, so only
ratios of one run count; the first batch warms up. Seconds are processor time, without loading. The
exported folder then translates the whole test set. Its best hypotheses, scores and BLEU are compared with
RUN/generate-test.txt. TEST.en is cut into symbols (data/…/bpe/test.en); PYTHON is that of .venv-integrations.
--ctranslate2 FOLDER names what `pip install --target FOLDER ctranslate2` has filled.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BATCH = 50
MAX_SYMBOLS = 200  # of a hypothesis, without its end: fairseq-generate's default
SUBWORD_MARK = re.compile(r"(@@ )|(@@ ?$)")
Hypotheses = list[
    tuple[str, float | None]
]  # symbols, and score in nats, of the best of each sentence


def fairseq_system(run: str, folder: str, beam: int) -> Callable[..., Hypotheses]:
    """The checkpoint, prepared and searched as fairseq-generate does."""
    import moa_fairseq

    moa_fairseq.register()
    import torch
    from fairseq import checkpoint_utils
    from fairseq.data import data_utils

    text = {"data": str(Path(run) / "text" / "binarised")}
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([f"{run}/average.pt"], text)
    search = SimpleNamespace(beam=beam, lenpen=1.0, max_len_b=MAX_SYMBOLS)
    models[0].prepare_for_inference_(SimpleNamespace(generation=SimpleNamespace(beam=beam)))
    generator = task.build_generator(models, search)
    source = task.source_dictionary
    target = task.target_dictionary

    def translate(sentences: list[str], scores: bool) -> Hypotheses:
        rows = [
            torch.tensor([*map(source.index, line.split()), source.eos()]) for line in sentences
        ]
        tokens = data_utils.collate_tokens(rows, source.pad(), left_pad=True)
        lengths = torch.tensor([len(row) for row in rows])
        batch = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
        best = [hypotheses[0] for hypotheses in generator.generate(models, batch)]
        return [(target.string(each["tokens"]), float(each["score"])) for each in best]

    return translate


def transformers_system(run: str, folder: str, beam: int) -> Callable[..., Hypotheses]:
    """The exported folder, with the tokenizer's ids: the sentences are cut into symbols already."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    import moa_fairseq.integrations.mixture_transformer  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ids = tokenizer._ids["source"]
    symbols = tokenizer._symbols["target"]
    marks = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def translate(sentences: list[str], scores: bool) -> Hypotheses:
        rows = []
        for line in sentences:
            words = [ids.get(word, tokenizer.unk_token_id) for word in line.split()]
            rows.append(torch.tensor([*words, tokenizer.eos_token_id]))
        padding = tokenizer.pad_token_id
        tokens = torch.nn.utils.rnn.pad_sequence(rows, True, padding)
        asked = {"return_dict_in_generate": True, "output_scores": scores}
        result = model.generate(tokens, attention_mask=tokens.ne(padding).long(), **asked)
        texts = []
        for row in result.sequences.tolist():
            texts.append(" ".join(symbols[index] for index in row if index not in marks))
        return list(zip(texts, result.sequences_scores.tolist() if scores else [None] * len(texts)))

    return translate


def ctranslate2_system(run: str, folder: str, beam: int) -> Callable[..., Hypotheses]:
    """The checkpoint of a dense model, converted."""
    sys.path.append(os.environ["CTRANSLATE2"])  # behind fairseq's own libraries
    import torch
    from ctranslate2 import Translator
    from ctranslate2.converters import FairseqConverter

    converted = f"{folder}/ctranslate2"
    with torch.serialization.safe_globals([argparse.Namespace]):
        converter = FairseqConverter(f"{run}/average.pt", f"{run}/text/binarised")
        converter.convert(converted, force=True)
    translator = Translator(converted, "cpu", intra_threads=1)

    def translate(sentences: list[str], scores: bool) -> Hypotheses:
        search = {"beam_size": beam, "max_decoding_length": MAX_SYMBOLS + 1}
        results = translator.translate_batch([line.split() for line in sentences], **search)
        return [(" ".join(result.hypotheses[0]), None) for result in results]

    return translate


SYSTEMS = {
    "fairseq": fairseq_system,
    "transformers": transformers_system,
    "ctranslate2": ctranslate2_system,
}


def serve(name: str, run: str, folder: str, beam: str) -> None:
    """The loop of a system's process: each line of its input is a batch, each of its output a translation."""
    import torch

    torch.set_num_threads(1)
    translate = SYSTEMS[name](run, folder, int(beam))
    print(json.dumps({"version": __import__(name).__version__}), flush=True)
    for line in sys.stdin:
        start = time.process_time()
        hypotheses = translate(**json.loads(line))
        seconds = time.process_time() - start
        print(json.dumps({"hypotheses": hypotheses, "seconds": seconds}), flush=True)


class System:
    """A process of `serve`.

    Args:
        name: of SYSTEMS.
        run: folder of the finished recipe.
        folder: the same run, exported; what a system converts is written there.
        beam: width of the search.
        args: of the command.
    """

    def __init__(self, name: str, run: Path, folder: Path, beam: int, args: argparse.Namespace):
        python = args.transformers if name == "transformers" else sys.executable
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment["CTRANSLATE2"] = str(args.ctranslate2)
        command = [python, __file__, "--serve", name, str(run.resolve()), str(folder), str(beam)]
        self.process: Any = subprocess.Popen(
            command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.version = self._answer()["version"]
        self.seconds: list[float] = []

    def _answer(self) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith("{"):  # not what libraries print
                return json.loads(line)
        raise RuntimeError(f"a system ended with status {self.process.wait()}")

    def translate(self, sentences: list[str], scores: bool = False) -> Hypotheses:
        """The best hypotheses of a batch; the seconds that they took are added to `seconds`."""
        self.process.stdin.write(json.dumps({"sentences": sentences, "scores": scores}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.seconds.append(answer["seconds"])
        return answer["hypotheses"]

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


def batches(sentences: list[str]) -> list[list[int]]:
    """Numbers of sentences of about the same length, in an order that mixes the lengths."""
    order = sorted(range(len(sentences)), key=lambda number: len(sentences[number].split()))
    starts = range(0, len(order), BATCH)
    step = next(step for step in (7, 11, 13) if math.gcd(step, len(starts)) == 1)
    mixed = [starts[place * step % len(starts)] for place in range(len(starts))]
    return [order[start : start + BATCH] for start in mixed]


def scores_of(log: Path) -> dict[int, float]:
    """fairseq-generate's scores of its best hypotheses, in nats."""
    lines = re.findall(r"^H-(\d+)\t(\S+)\t", log.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {int(number): float(score) * math.log(2) for number, score in lines}


def compared(answers: dict[int, tuple[str, float]], log_file: Path) -> dict[str, Any]:
    """The best hypotheses of the export, compared with fairseq-generate's.

    Args:
        answers: number of a sentence → text and score.
        log_file: generate-test.txt.
    """
    from moa_fairseq.experiments.scoring.chains import multi_bleu
    from moa_fairseq.experiments.scoring.generate_log import read_generate_log

    log = read_generate_log(log_file)
    scores = scores_of(log_file)
    texts = []
    differences = []  # of scores, where the texts are equal
    others = []
    for number, theirs in zip(log.ids, log.hypotheses):
        symbols, score = answers[number]
        text = SUBWORD_MARK.sub("", symbols)
        texts.append(text)
        difference = score - scores[number]
        if text == theirs:
            differences.append(abs(difference))
        else:
            row = {"sentence": number, "score_difference": difference}
            others.append(row | {"transformers": text, "fairseq-generate": theirs})
    return {
        "sentences": len(texts),
        "equal": len(differences),
        "largest_score_difference_of_equal": max(differences, default=None),
        "others": others,
        "bleu_transformers": multi_bleu(texts, [log.targets])["score"],
        "bleu_fairseq_generate": multi_bleu(log.hypotheses, [log.targets])["score"],
    }


def measure(run: Path, sentences: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Speeds and answers of one run."""
    from moa_fairseq.cli import main as moa_fairseq

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "exported"
        assert moa_fairseq(["export", str(run), str(folder), "--transformers"]) == 0
        beam = json.loads((folder / "generation_config.json").read_text())["num_beams"]
        family = json.loads((folder / "config.json").read_text())["decoder_stack"]["family"]
        names = ["fairseq", "transformers"]
        if family == "dense" and args.ctranslate2:
            names.append("ctranslate2")
        systems = {name: System(name, run, folder, beam, args) for name in names}
        parts = batches(sentences)
        for part in parts[: args.turns + 1]:
            for system in systems.values():
                system.translate([sentences[number] for number in part])
        seconds = {name: sum(system.seconds[1:]) for name, system in systems.items()}
        answers: dict[int, tuple[str, float]] = {}
        for part in parts:
            batch = [sentences[number] for number in part]
            answers.update(zip(part, systems["transformers"].translate(batch, scores=True)))
        for system in systems.values():
            system.close()
    timed = sum(map(len, parts[1 : args.turns + 1]))
    return {
        "experiment": json.loads((run / "result.json").read_text(encoding="utf-8"))["experiment"],
        "beam": beam,
        "versions_of_systems": {name: system.version for name, system in systems.items()},
        "sentences_per_second": {name: timed / spent for name, spent in seconds.items()},
        "over_fairseq": {name: seconds["fairseq"] / spent for name, spent in seconds.items()},
        "answers": compared(answers, run / "generate-test.txt"),
    }


def main() -> None:
    """Measure, print and write the record."""
    from moa_fairseq.experiments.recipes.hardware import detect_hardware
    from moa_fairseq.experiments.records.provenance import provenance
    from moa_fairseq.files import atomic_write
    from moa_fairseq.files.utf8 import use_utf8

    use_utf8()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="folder of a finished recipe"
    )
    parser.add_argument("--source", type=Path, required=True, help="the test set's source, symbols")
    parser.add_argument("--transformers", required=True, metavar="PYTHON")
    parser.add_argument("--ctranslate2", type=Path, metavar="FOLDER")
    parser.add_argument("--turns", type=int, default=12, help=f"timed batches of {BATCH} sentences")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "benchmarks")
    args = parser.parse_args()
    origin = provenance()
    sentences = args.source.read_text(encoding="utf-8").rstrip("\n").split("\n")
    record = {
        "benchmark": "translation",
        "hardware": detect_hardware().describe(),
        "threads": 1,
        "batch": BATCH,
        "turns": args.turns,
        "load": os.getloadavg()[1],
        **origin,
        "runs": [measure(run, sentences, args) for run in args.runs],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    with atomic_write(args.output / "translation-cpu.json") as stream:
        json.dump(record, stream, indent=1, ensure_ascii=False)
        stream.write("\n")
    for row in record["runs"]:
        print(row["experiment"], json.dumps(row["sentences_per_second"]))
        print(json.dumps(row["answers"], ensure_ascii=False))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
