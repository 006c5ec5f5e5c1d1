"""`moa-fairseq zero-shot`: lm_eval's numbers are those of a plain loop over the model in float64."""

import argparse
import functools
import json
import random
import shutil
import stat
from types import SimpleNamespace

import pytest
import torch
import yaml
from shared_fixtures import USER_DIR

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING
from moa_fairseq.experiments.data.prepare import Preparation
from moa_fairseq.experiments.inference import text_model, zero_shot
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe
from moa_fairseq.process import Executor

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm_eval is not here: bash scripts/test.sh --zero-shot"
)
CHUNK = 12
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "dogs",
    "ran",
    "home",
    "quickly",
    "again",
]
TEXTS = [
    "the cat",
    "dogs ran home",
    *(f"{'a mat and ' * 7}{word}" for word in ("dogs", "quickly", "cat")),
]
TASKS = {
    "pairs": {
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_choice": "{{[text, text ~ ' again']}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' ' + text.split(' ')[-1]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "go_on": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": ["a"], "max_gen_toks": 5},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def json_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def sentences(count, seed, longest=9):
    generator = random.Random(seed)
    return [
        " ".join(generator.choices(WORDS, k=generator.randint(2, longest)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tasks over five short and long local texts."""
    place = tmp_path_factory.mktemp("tasks")
    write_task = writer(place)
    for name, task in TASKS.items():
        write_task(name, [{"text": text} for text in TEXTS], **task)
    return place


def writer(place):
    def write(name, documents, **task):
        (place / f"{name}.jsonl").write_text(
            "".join(f"{json.dumps(each)}\n" for each in documents)
        )
        local = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(place / f"{name}.jsonl")}},
        }
        metadata = {"task": name, "test_split": "test", "metadata": {"version": 3.0}}
        (place / f"{name}.yaml").write_text(yaml.safe_dump({**metadata, **local, **task}))

    return write


@pytest.fixture(scope="module")
def data(tmp_path_factory, preprocess):
    """Text in 34 SentencePiece pieces."""
    source = tmp_path_factory.mktemp("text")
    for seed, split in enumerate(("train", "valid", "test")):
        (source / f"{split}.txt").write_text(
            "\n".join(sentences(120 if split == "train" else 20, seed)) + "\n"
        )
    settings = {"recipe": "text_sp", "bpe": 34, "flags": {}}
    root = tmp_path_factory.mktemp("prepared")
    return (
        Preparation(settings, ["train", "valid", "test"], source, root, preprocess).run().folder
    )


@pytest.fixture(scope="module")
def train(fairseq, tmp_path_factory):
    """train(arch, data, *flags) → the folder of a language model after three updates."""

    @functools.cache
    def run(arch, data, *more):
        place = tmp_path_factory.mktemp("run")
        line = f"{data} --user-dir {USER_DIR} --cpu --arch {arch} --decoder-layers 2"
        line += " --decoder-embed-dim 24 --decoder-input-dim 24 --decoder-output-dim 24"
        line += f" --decoder-ffn-embed-dim 24 --tokens-per-sample {CHUNK} --max-tokens 240"
        line += " --optimizer adam --lr 0.03 --num-workers 0 --max-update 3 --seed 7"
        line += f" --criterion cross_entropy --save-dir {place}"
        fairseq("train", *line.split(), *more)
        return place

    return run


CARRIED = ("--task", "language_modeling_truncated_bptt", "--carried-chunks", 1)
WINDOWS = ("--task", "language_modeling", "--positions", "rope")
ADAPTIVE = ("--adaptive-softmax-cutoff", "10,20", "--criterion", "adaptive_loss")
ADAPTIVE += ("--ddp-backend", "legacy_ddp")


def harness_of(run, data, segmented=False):
    from moa_fairseq.experiments.inference.harness import HarnessModel

    args = argparse.Namespace(
        run_dir=run, data=data, file=None, output=None, segmented=segmented, cpu=True
    )
    return HarnessModel(text_model.load(args, LANGUAGE_MODELING).double(), max_tokens=60)


@pytest.mark.parametrize(("max_tokens", "sizes"), [(60, [3, 3, 1]), (59, [2, 2, 2, 1])])
def test_batches_are_filled_to_their_limit(max_tokens, sizes):
    from moa_fairseq.experiments.inference.harness import HarnessModel

    limits = argparse.Namespace(chunk_length=100, max_tokens=max_tokens)
    batches = HarnessModel._batches(limits, [[4] * 20] * 7)
    assert [len(batch) for batch in batches] == sizes


def samples_of(harness, folders, *tasks, of=None):
    """task → (arguments, answer) of each request, from lm_eval; of: the group that is asked for."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folders, include_defaults=False)
    asked = {
        "tasks": [of] if of else list(tasks),
        "task_manager": manager,
        "bootstrap_iters": 0,
    }
    found = lm_eval.simple_evaluate(model=harness, **asked)["samples"]
    return {
        task: [
            pair
            for each in found[task]
            for pair in zip(each["arguments"], (r[0] for r in each["resps"]))
        ]
        for task in tasks
    }


@torch.no_grad()
def log_probs_behind(harness, ids):
    """log p of every symbol behind ids, [V] float64: passes over this one text, without padding."""
    network = harness.network
    if harness.carries_context:
        for chunk, start in enumerate(range(0, len(ids), CHUNK)):
            out = network(torch.tensor([ids[start : start + CHUNK]]), chunk=chunk)[0]
    else:
        out = network(torch.tensor([ids]))[0]
    assert out.dtype == torch.float64
    if network.decoder.adaptive_softmax is not None:
        return network.decoder.adaptive_softmax.get_log_prob(out[:, -1:], None)[0, 0]
    return out[0, -1].log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["transformer_xl_lm_tiny", "switchhead_lm_tiny", "moa_lm_tiny"]
)
def test_numbers_with_a_carried_context_are_those_of_a_loop_in_float64(
    train, data, folder, arch
):
    harness = harness_of(train(arch, data, *CARRIED), data)
    end = harness.eot_token_id
    found = samples_of(harness, folder, "pairs", "last_word")
    lengths = []
    for task, requests in found.items():
        for texts, answer in requests:
            ids = [end, *harness.tok_encode("".join(texts))]
            first = 1 + (len(harness.tok_encode(texts[0])) if task == "last_word" else 0)
            total = 0.0
            greedy = True
            for place in range(first, len(ids)):
                log_probs = log_probs_behind(harness, ids[:place])
                total += log_probs[ids[place]].item()
                greedy &= log_probs.argmax().item() == ids[place]
            assert answer == (
                pytest.approx(total, rel=0, abs=1e-9 * (len(ids) - first)),
                greedy,
            )
            lengths.append(len(ids))
    assert len(lengths) == 10 + 5 and max(lengths) > 3 * CHUNK > min(lengths)


@pytest.mark.parametrize(
    "arch, flags",
    [
        ("moa_lm_tiny", WINDOWS),
        pytest.param("moa_lm_tiny", (*WINDOWS, *ADAPTIVE), marks=pytest.mark.thorough),
        pytest.param("dense_transformer_lm_base", WINDOWS[:2], marks=pytest.mark.thorough),
    ],
    ids=["moa", "adaptive", "dense"],
)
def test_without_a_carried_context_windows_are_read(train, data, folder, arch, flags):
    harness = harness_of(train(arch, data, *flags), data)
    end = harness.eot_token_id
    found = samples_of(harness, folder, "last_word")
    for (context, word), (total, greedy) in found["last_word"]:
        ids = [end, *harness.tok_encode(context + word)]
        first = 1 + len(harness.tok_encode(context))
        window = max(0, len(ids) - 1 - CHUNK)
        read = [
            log_probs_behind(harness, ids[window:place]) for place in range(first, len(ids))
        ]
        expected = [each[symbol].item() for each, symbol in zip(read, ids[first:])]
        assert total == pytest.approx(sum(expected), rel=0, abs=1e-9 * len(expected))
        assert greedy == ([each.argmax().item() for each in read] == ids[first:])
    texts = [texts for texts, _ in found["last_word"]]
    facts = harness.text_facts(texts)
    assert facts["requests"] == 5 and facts["cut"] == 3 and facts["unknown"] == 0
    longest = harness.tok_encode(TEXTS[-1])[:CHUNK]
    ((total, _),) = harness._loglikelihood_tokens(
        [(("", ""), [end], longest)], disable_tqdm=True
    )
    read = [log_probs_behind(harness, [end, *longest[:place]]) for place in range(CHUNK)]
    expected = [each[symbol].item() for each, symbol in zip(read, longest, strict=True)]
    assert total == pytest.approx(sum(expected), rel=0, abs=1e-9 * CHUNK)
    with pytest.raises(UserError, match="Leave the task out"):
        samples_of(harness, folder, "pairs")
    for task in ("whole", "go_on"):
        with pytest.raises(UserError, match="--tasks"):
            samples_of(harness, folder, task)


def test_a_word_that_the_dictionary_lacks_is_counted_and_not_greedy(
    train, preprocess, tmp_path, monkeypatch
):
    from moa_fairseq.experiments.inference.harness import Predictions

    (tmp_path / "train.txt").write_text("\n".join(sentences(120, 1)) + "\n")
    (tmp_path / "valid.txt").write_text("\n".join(sentences(20, 2)) + "\n")
    texts = {f"{split}pref": str(tmp_path / f"{split}.txt") for split in ("train", "valid")}
    preprocess({"only-source": True, "destdir": str(tmp_path / "bin"), **texts})
    harness = harness_of(
        train("moa_lm_tiny", tmp_path / "bin", *CARRIED), tmp_path / "bin", segmented=True
    )
    ids = harness.tok_encode("the zebra sat\n<pad> on")
    assert [harness.dictionary[each] for each in ids] == [
        "the",
        "<unk>",
        "sat",
        "</s>",
        "<unk>",
        "on",
    ]
    monkeypatch.setattr(
        harness, "_output", lambda x, target: Predictions(torch.zeros(len(x)), target)
    )
    known, lacking = (SimpleNamespace(args=("the cat", word)) for word in (" sat", " zebra"))
    assert harness.loglikelihood([known, lacking]) == [(0.0, True), (0.0, False)]
    with pytest.raises(UserError, match="target_delimiter"):
        harness.loglikelihood([SimpleNamespace(args=("the ca", "t"))])
    facts = harness.text_facts([("the cat", " zebra"), ("zebra", " cat"), ("", "the zebra")])
    assert facts == {"requests": 3, "symbols": 7, "unknown": 3, "unknown_targets": 2, "cut": 0}


def test_the_command_writes_scores_where_compare_reads_them(
    train, data, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(train("switchhead_lm_tiny", data, *CARRIED), run)
    before = {"lm_ppl": 9.0, "lambada_acc": -1.0}
    (run / "result.json").write_text(json.dumps({"experiment": "mine", "metrics": before}))
    write_task = writer(tmp_path)
    write_task("lambada_openai", [{"text": text} for text in TEXTS], **TASKS["last_word"])
    command = f"zero-shot {run} --data {data} --include-path {tmp_path} --cpu".split()
    command += ["--tasks", "lambada_openai"]
    assert main([*command, "--limit", "2"]) == 0
    assert json_of(run / "zero_shot.json")["tasks"]["lambada_openai"]["documents"] == 2
    assert json_of(run / "result.json")["metrics"] == before
    answered = []

    def interrupt(self, features, targets):
        answered.append(len(targets))
        if len(answered) == 2:
            raise KeyboardInterrupt
        return output(self, features, targets)

    from moa_fairseq.experiments.inference.harness import HarnessModel

    output = HarnessModel._output
    given_away = sorted(path.name for path in run.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(HarnessModel, "_output", interrupt)
        assert main([*command, "--max-tokens", "12"]) == 130
    # lm_eval unpickles what it finds there
    assert sorted(path.name for path in run.iterdir()) == given_away
    (answers,) = (tmp_path / "cache").rglob("*.db")
    assert stat.S_IMODE(answers.parent.stat().st_mode) == 0o700
    other = tmp_path / "other"
    shutil.copytree(run, other)
    for path in other.glob("*.pt"):
        torch.save({**torch.load(path, weights_only=False), "trained": "again"}, path)
    again = []
    monkeypatch.setattr(HarnessModel, "_output", lambda *args: again.append(0) or output(*args))
    assert main([*command, "--max-tokens", "12", "--segmented"]) == 0
    assert answers.exists(), "other text has answers of its own"
    again.clear()
    assert main([*command, "--max-tokens", "12"]) == 0
    assert len(again) == 5 - 1 and not list((tmp_path / "cache").rglob("*.db"))
    again.clear()
    assert main([command[0], str(other), *command[2:], "--max-tokens", "12"]) == 0
    assert len(again) == 5, "another checkpoint answers again"
    record = json_of(run / "zero_shot.json")
    assert (record["lm_eval"], record["limit"], record["carried_chunks"]) == (
        lm_eval.__version__,
        None,
        1,
    )
    task = record["tasks"]["lambada_openai"]
    assert (task["version"], task["documents"], task["shots"]) == (3.0, 5, 0)
    result = json_of(run / "result.json")
    assert result["metrics"] == {"lm_ppl": 9.0, "lambada_acc": 100 * task["metrics"]["acc"]}
    capsys.readouterr()
    assert main(["compare", str(run)]) == 0
    assert "LAMBADA" in capsys.readouterr().out
    task["text"].update(symbols=8, unknown=2, requests=4)
    assert " 25.00%" in zero_shot._table_text(record)


class WithLocalTasks(Executor):
    """Gives zero-shot a folder of local tasks, which a recipe does not name: they can run code."""

    def run(self, command, *args, **options):
        if command[1] == "zero-shot":
            command = [*command, "--include-path", "tasks"]
        super().run(command, *args, **options)


@pytest.mark.slow
def test_a_recipe_ends_with_its_tasks(tmp_path, monkeypatch, capsys):
    """From text to LAMBADA's column of compare, and once: what is done is not done again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    texts = [{"text": text} for text in TEXTS]
    writer(tmp_path / "tasks")("lambada_openai", texts, **TASKS["last_word"])
    (tmp_path / "text").mkdir()
    for seed, split in enumerate(("train", "valid", "test")):
        (tmp_path / "text" / f"{split}.txt").write_text("\n".join(sentences(120, seed)) + "\n")
    widths = {f"decoder-{name}-dim": 24 for name in ("embed", "input", "output", "ffn-embed")}
    recipe = {
        "base": "wikitext2_lm_switchhead_tiny.yaml",
        "data": {"recipe": "text_sp", "bpe": 30},
        "model": {"flags": {"decoder-layers": 1, **widths}},
        "train": {
            "max_tokens": 240,
            "effective_batch_tokens": 240,
            "max_update": 3,
            "flags": {"tokens-per-sample": CHUNK},
        },
        "zero_shot": ["lambada_openai"],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    run = tmp_path / "run"
    options = Options(data=tmp_path / "text", save_dir=run)
    run_recipe(load_recipe(tmp_path / "mine.yaml"), Hardware(), options, WithLocalTasks)
    task = json_of(run / "zero_shot.json")["tasks"]["lambada_openai"]
    result = json_of(run / "result.json")
    assert task["documents"] == 5 and result["zero_shot"]["lm_eval"] == lm_eval.__version__
    assert result["metrics"]["lambada_acc"] == 100 * task["metrics"]["acc"]
    made = (run / "zero_shot.json").stat().st_mtime_ns
    run_recipe(load_recipe(tmp_path / "mine.yaml"), Hardware(), options, WithLocalTasks)
    assert (run / "zero_shot.json").stat().st_mtime_ns == made
    assert json_of(run / "result.json")["metrics"] == result["metrics"]
    capsys.readouterr()
    assert main(["compare", str(run)]) == 0
    assert "LAMBADA" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--tasks", "cbt_cm"], "cbt_cn"),
        (["--tasks", ","], "--tasks"),
        (["--tasks", "cbt", "--include-path", "nowhere"], "--include-path"),
        (["--tasks", "cbt", "--limit", "0"], "--limit"),
    ],
)
def test_what_cannot_be_asked_is_named(words, message, capsys):
    assert main(["zero-shot", "runs/x", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_childrens_book_test_asks_for_the_word_and_the_rest_of_its_sentence(
    train, data, tmp_path
):
    document = {
        "sentences": ["`` The cat sat , '' said the dogs .", "He did n't run !"] * 10,
        "question": "`` A XXXXX 's mat , '' said he .",
        "options": WORDS[:10],
        "answer": "dogs",
    }
    write_task = writer(tmp_path)
    for part in ("cn", "ne", "p", "v"):
        task = {
            "include": str(zero_shot.TASKS / f"cbt_{part}.yaml"),
            "dataset_name": None,
            "validation_split": None,
        }
        write_task(f"cbt_{part}", [document] * 2, **task)
    harness = harness_of(train("moa_lm_tiny", data, *CARRIED), data)
    found = samples_of(harness, [zero_shot.TASKS, tmp_path], "cbt_cn", of="cbt")["cbt_cn"]
    assert len(found) == 2 * 10
    sentences_before = " ".join(['"The cat sat," said the dogs.', "He didn't run!"] * 10)
    assert {texts for texts, _ in found} == {
        (f'{sentences_before} "A', f" {word}'s mat,\" said he.") for word in WORDS[:10]
    }
