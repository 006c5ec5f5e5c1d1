"""Chunks in order and the context between them: batches, model, fairseq's own commands."""

import argparse
import copy
import itertools
import json
import math

import pytest
import torch
from chunked_training import SMALL, arguments
from fairseq import options
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.plugin.fairseq_compat import load_checkpoint
from moa_fairseq.plugin.tasks.language_modeling_truncated_bptt import (
    OrderedChunks,
    TruncatedBPTTTask,
)

ARCHS = ["switchhead_lm_tiny", "transformer_xl_lm_tiny", "moa_lm_tiny", "switchall_lm_tiny"]


class Blocks(torch.utils.data.Dataset):
    """So many blocks; a batch of them says which they are."""

    def __init__(self, count):
        self.count = count
        self.sizes = [1] * count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"id": index}

    def collater(self, samples):
        return {"id": [sample["id"] for sample in samples], "net_input": {}}


@pytest.mark.parametrize(
    ("count", "rows", "shards", "steps"),
    [
        *[
            (12, 3, 1, 1),
            (13, 4, 1, 1),
            (13, 4, 2, 1),
            (5, 4, 1, 1),
            (7, 9, 1, 1),
            (1, 1, 1, 1),
        ],
        *[(16, 4, 4, 1), (16, 4, 1, 4), (29, 6, 1, 3), (29, 8, 2, 2)],
    ],
)
def test_each_block_once_and_every_text_in_order(count, rows, shards, steps):
    parts = shards * steps
    ordered = OrderedChunks(Blocks(count), rows, parts)
    batches = ordered.batches(shards)
    assert sorted(block for batch in batches for block in batch) == list(range(count))
    # All of them read one chunk, then the next; a shard has neighbouring parts
    for part in range(parts):
        mine = [
            batch for batch in batches[part % steps * shards + part // steps :: parts] if batch
        ]
        for before, after in itertools.pairwise(mine):
            assert [
                block + 1 for block in before[: len(after)]
            ] == after  # row by row, the next block
        for chunk, batch in enumerate(mine):
            given = ordered.collater([ordered[block] for block in batch])["net_input"]
            assert given == {"chunk": chunk, "part": part}


@pytest.mark.parametrize(
    ("tokens", "sentences", "rows"),
    [(40, 3, 3), (16, 3, 2), (None, 3, 3), (40, None, 5), (None, None, 1)],
)
def test_the_smaller_limit_of_a_batch_counts(tokens, sentences, rows):
    task = argparse.Namespace(
        args=argparse.Namespace(tokens_per_sample=8, train_subset="train", seed=1)
    )
    task.datasets = {}
    found = TruncatedBPTTTask.get_batch_iterator(task, Blocks(24), tokens, sentences)
    assert found.dataset.texts == rows


def test_micro_batches_have_texts_of_their_own_in_the_training_subset_alone():
    args = argparse.Namespace(
        tokens_per_sample=8, train_subset="train1", seed=1, update_freq=[2]
    )
    training, other = Blocks(24), Blocks(24)
    task = argparse.Namespace(args=args, datasets={"train1": training, "train": other})
    task._micro_batches = lambda: TruncatedBPTTTask._micro_batches(task)
    for dataset, parts in ((training, 2), (other, 1)):
        assert TruncatedBPTTTask.get_batch_iterator(task, dataset, 40).dataset.parts == parts


def build(arch="switchhead_lm_tiny", chunks=1, flags=()):
    words = Dictionary()
    for i in range(40):
        words.add_symbol(f"w{i}")
    args = options.parse_args_and_arch(
        options.get_training_parser(),
        ["data", "--task", "language_modeling", "--arch", arch, *SMALL, *flags],
    )
    torch.manual_seed(4)
    model = ARCH_MODEL_REGISTRY[arch].build_model(
        args,
        argparse.Namespace(source_dictionary=words, target_dictionary=words, dictionary=words),
    )
    if chunks:
        model.decoder.carry_context(chunks)
    with (
        torch.no_grad()
    ):  # the router's choices must not depend on a last bit, biases must matter
        for name, parameter in model.named_parameters():
            if "bias" in name and "positions" in name:
                parameter.normal_(std=0.2)
    return model.eval()


@pytest.mark.parametrize("flags", [(), ("--positions", "rope")], ids=["xl", "rope"])
@pytest.mark.parametrize("arch", ARCHS)
def test_one_layer_after_another_equals_one_long_pass(arch, flags):
    """With a context as long as all that was read, chunks give what one pass gives."""
    model = build(arch, chunks=3, flags=flags)
    tokens = torch.randint(4, 40, (3, 12))
    full, _ = model(tokens)
    parts = [model(tokens[:, 3 * i : 3 * i + 3], chunk=i)[0] for i in range(4)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-5)


def test_the_context_is_one_chunk_and_reaches_back_layer_by_layer():
    model = build(chunks=1)
    tokens = torch.randint(4, 40, (1, 12))
    changed = tokens.clone()
    changed[0, 2] = 4 + (tokens[0, 2] - 3) % 36

    def outputs(text):
        return [model(text[:, 3 * i : 3 * i + 3], chunk=i)[0] for i in range(4)]

    same = [torch.allclose(a, b, atol=1e-6) for a, b in zip(outputs(tokens), outputs(changed))]
    assert same == [False, False, False, True]  # two layers look two chunks back, no further


def test_gradients_stop_at_the_chunk_but_projections_learn_from_the_context():
    model = build("transformer_xl_lm_tiny").train()
    tokens = torch.randint(4, 40, (2, 6))
    embedding = model.decoder.embed_tokens.weight
    model(tokens[:, :3], chunk=0)
    second, _ = model(tokens[:, 3:], chunk=1)
    (grad,) = torch.autograd.grad(second.sum(), embedding, retain_graph=True)
    read = set(tokens[:, 3:].flatten().tolist())
    assert {row for row in range(len(grad)) if grad[row].abs().sum() > 0} == read


def test_what_breaks_a_text_breaks_the_context():
    model = build("transformer_xl_lm_tiny")
    tokens = torch.randint(4, 40, (3, 9))
    alone = model(tokens[:, 3:6])[0]
    with_context = (model(tokens[:, :3], chunk=0), model(tokens[:, 3:6], chunk=1)[0])[1]
    assert not torch.allclose(alone, with_context, atol=1e-4)

    def after(first, *others):
        first()
        for other in others:
            other()
        return model.eval()(tokens[:, 3:6], chunk=1)[0]

    def read(chunk, rows=3):
        return lambda: model.eval()(tokens[:rows, 3 * chunk : 3 * chunk + 3], chunk=chunk)

    def train():
        with torch.no_grad():
            model.train()(tokens[:, 6:], chunk=0)

    torch.testing.assert_close(after(read(0)), with_context)
    # Training has a context of its own
    torch.testing.assert_close(after(read(0), train), with_context)
    # A pass beside the text
    torch.testing.assert_close(after(read(0), lambda: model(tokens)), with_context)
    torch.testing.assert_close(after(read(2)), alone)
    torch.testing.assert_close(after(read(0), lambda: model(tokens[:, :3], chunk=5)), alone)
    read(0)()
    torch.testing.assert_close(model(tokens[:, 3:6], chunk=2)[0], alone)  # a chunk was left out
    torch.testing.assert_close(
        after(read(0), read(1)), alone
    )  # the same chunk again: another text
    torch.testing.assert_close(
        after(read(0, rows=2)), alone
    )  # texts that were not there before
    read(0)()
    fewer = model(tokens[:2, 3:6], chunk=1)[0]  # the last text has ended
    torch.testing.assert_close(fewer, with_context[:2])


def test_a_failed_pass_leaves_no_half_context():
    model = build("transformer_xl_lm_tiny")
    tokens = torch.randint(4, 40, (1, 6))
    alone = model(tokens[:, 3:])[0]
    hook = model.decoder.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens[:, :3], chunk=0)
    hook.remove()
    torch.testing.assert_close(model(tokens[:, 3:], chunk=1)[0], alone)
    assert torch.isfinite(
        copy.deepcopy(model)(tokens, chunk=0)[0]
    ).all()  # as an average of weights would


def test_checkpointed_activations_see_the_same_context():
    grads = []
    for flags in ((), ("--checkpoint-activations",)):
        still = ("--dropout", "0", "--activation-dropout", "0", "--output-dropout", "0")
        model = build(flags=(*still, *flags)).train()
        tokens = torch.randint(4, 40, (2, 8), generator=torch.Generator().manual_seed(1))
        loss = sum(
            model(tokens[:, 4 * i : 4 * i + 4], chunk=i)[0].square().sum() for i in range(2)
        )
        loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*grads):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("how", ["autocast", "model"])
def test_bfloat16_trains_every_parameter(arch, how):
    model = build(arch).train()
    model = model.to(torch.bfloat16) if how == "model" else model
    tokens = torch.randint(4, 40, (2, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        out = [model(tokens[:, 4 * i : 4 * i + 4], chunk=i)[0] for i in range(2)][1]
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.fixture(scope="module")
def toy_lm(tmp_path_factory, fairseq, toy_text):
    folder = tmp_path_factory.mktemp("lm")
    done = fairseq("train", *arguments(toy_text, folder, "--max-epoch", 2, "--update-freq", 2))
    return folder / "checkpoint_last.pt", done


@pytest.mark.slow
def test_fairseq_train(toy_lm):
    _, done = toy_lm
    losses = [
        float(json.loads(line.split(" | ")[-1])["valid_loss"])
        for line in done.stderr.splitlines() + done.stdout.splitlines()
        if '"valid_loss"' in line
    ]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert '"load_entropy"' in done.stdout + done.stderr


STILL = ("--dropout", 0, "--activation-dropout", 0, "--output-dropout", 0, "--max-update", 10)
STILL += ("--adam-eps", 1e-4)


@pytest.mark.thorough
def test_processes_and_micro_batches_read_the_texts_of_one_batch(fairseq, toy_text, tmp_path):
    """Of six texts, an update reads one chunk each, in one pass, in two, or in two processes."""

    def words(folder, *flags):
        return arguments(toy_text, tmp_path / folder, *STILL, *flags, arch="switchhead_lm_tiny")

    fairseq("train", *words("one"))
    fairseq("train", *words("halves", "--batch-size", 3, "--update-freq", 2))
    fairseq.together(*words("two", "--batch-size", 3))  # process 0 has the first three texts
    one, *others = (
        load_checkpoint(tmp_path / folder / "checkpoint_last.pt")["model"]
        for folder in ("one", "halves", "two")
    )
    for weights in others:
        # Names the parameter that differs
        torch.testing.assert_close(weights, one, rtol=2e-3, atol=2e-4)
    done = fairseq("train", *words("three", "--update-freq", "1,2"), check=False)
    assert "--update-freq 1,2" in done.stderr and "give one number" in done.stderr


def perplexity(done):
    text = done.stdout + done.stderr
    loss = float(text.split("Loss (base 2): ")[1].split(",")[0])
    return loss, int(text.split("Evaluated ")[1].split(" ")[0].replace(",", ""))


def evaluate(fairseq, data, model, *flags, check=True):
    return fairseq(
        "eval_lm",
        data,
        *(
            "--user-dir",
            moa_fairseq.__path__[0],
            "--cpu",
            "--path",
            model,
            "--gen-subset",
            "test",
        ),
        *("--tokens-per-sample", 8, *flags),
        check=check,
    )


@pytest.mark.thorough
def test_fairseq_eval_lm_in_order_and_sliding(fairseq, toy_text, toy_lm):
    model, _ = toy_lm
    chunked = ["--task", "language_modeling_truncated_bptt", "--batch-size", 3]
    plain = ["--task", "language_modeling", "--batch-size", 3, "--sample-break-mode", "none"]
    in_order, tokens = perplexity(evaluate(fairseq, toy_text, model, *chunked))
    alone, same = perplexity(
        evaluate(fairseq, toy_text, model, *chunked, "--carried-chunks", 0)
    )
    apart, _ = perplexity(evaluate(fairseq, toy_text, model, *plain))
    sliding, _ = perplexity(evaluate(fairseq, toy_text, model, *plain, "--context-window", 6))
    assert tokens == same == 411 + math.ceil(411 / 17)  # every token once, ends of lines too
    assert alone == pytest.approx(apart, abs=2e-3) and abs(in_order - alone) > 2e-3
    assert math.isfinite(sliding) and abs(sliding - apart) > 2e-3


@pytest.mark.thorough
def test_fairseq_generate_goes_on_with_a_prefix(fairseq, toy_text, toy_lm):
    model, _ = toy_lm
    done = fairseq(
        "interactive",
        toy_text,
        *(
            "--user-dir",
            moa_fairseq.__path__[0],
            "--cpu",
            "--task",
            "language_modeling",
            "--path",
            model,
        ),
        *("--beam", 3, "--max-len-b", 12, "--nbest", 1),
        stdin="w1 w2 w3\n",
    )
    hypothesis = next(line for line in done.stdout.splitlines() if line.startswith("H-"))
    assert hypothesis.split("\t")[2].startswith("w1 w2 w3")


def build_without_context():
    with pytest.MonkeyPatch.context() as patch:
        dense = argparse.Namespace(decoder=object())
        patch.setattr(
            "fairseq.tasks.language_modeling.LanguageModelingTask.build_model", lambda *_: dense
        )
        task_of(carried_chunks=1).build_model(argparse.Namespace())


def task_of(**args):
    task = TruncatedBPTTTask.__new__(TruncatedBPTTTask)
    standard = {"tokens_per_sample": 8, "seed": 1, "train_subset": "train", "update_freq": [1]}
    task.args = argparse.Namespace(**standard, **args)
    task.datasets = {}
    return task


def setup(**settings):
    args = {"carried_chunks": 1, "sample_break_mode": "none", **settings}
    TruncatedBPTTTask.setup_task(argparse.Namespace(**args))


@pytest.mark.parametrize(
    "attempt, says",
    [
        (lambda: build(flags=("--positions", "sinusoidal")), "--positions xl"),
        (
            lambda: build(flags=("--decoder-layerdrop", "0.5")),
            "--carried-chunks.*--decoder-layerdrop",
        ),
        (build_without_context, "transformer_xl_lm_47m"),
        (lambda: task_of().eval_lm_dataloader(None, context_window=4), "--context-window"),
        (lambda: setup(sample_break_mode="eos"), "--sample-break-mode eos"),
        (lambda: setup(carried_chunks=-1), "--carried-chunks .*-1"),
        (lambda: task_of().get_batch_iterator(Blocks(20), 7), "--max-tokens 7"),
        (
            lambda: task_of().get_batch_iterator(Blocks(3), 800, num_shards=4),
            "3 chunks of --tokens-per-sample 8 .* 4 processes",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_flag(attempt, says):
    with pytest.raises(UserError, match=says):
        attempt()


def test_layers_may_be_dropped_without_a_context():
    build(chunks=0, flags=["--decoder-layerdrop", "0.5"])
