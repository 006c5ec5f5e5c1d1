"""Two processes train what one trains with the same global batches, for every family.

Several small trainings share a process: starting one costs more than twenty updates.
"""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

import moa_fairseq
from moa_fairseq.fairseq_compat import load_checkpoint

USER_DIR = os.path.dirname(moa_fairseq.__file__)
UPDATES = 20
# 16 experts of which a token picks one, and batches of few tokens: some experts are idle in every batch
SPARSE = ("--num-experts", 16, "--experts-per-token", 1)
ROUTING = ("--criterion", "label_smoothed_cross_entropy_with_routing")
PLAIN = ("--criterion", "label_smoothed_cross_entropy")
# family → arch and what goes with it; a new family is one line
FAMILIES = {
    "dense": ("transformer", *PLAIN, "--encoder-embed-dim", 64, "--decoder-embed-dim", 64),
    "moa": ("moa_transformer_tiny", *ROUTING, *SPARSE),
    "switchhead": ("switchhead_transformer_tiny", *ROUTING, *SPARSE, "--switchhead-experts", "vkqo"),
    # (a large epsilon: Adam would blow the rounding errors of vanishing gradients up to whole steps)
    "mae": ("mae_transformer_tiny", *PLAIN, "--gate-dropout", 0, "--adam-eps", 1e-4),
}
TRAIN_IN_TURN = """
import json, sys
from fairseq_cli.train import cli_main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["fairseq-train", *arguments]
    cli_main()
"""


def arguments(family, data, folder, *more):
    """One layer each way, a few updates per epoch, no dropout (its noise would depend on the processes)."""
    arch, *flags = FAMILIES[family]
    line = [data, "--user-dir", USER_DIR, "--cpu", "--arch", arch, "--share-all-embeddings", *flags]
    line += ["--encoder-layers", 1, "--decoder-layers", 1, "--dropout", 0, "--label-smoothing", 0.1]
    line += ["--optimizer", "adam", "--lr", 0.001, "--max-tokens", 60, "--num-workers", 0, "--seed", 7]
    line += ["--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints", "--save-dir", folder]
    return [str(word) for word in (*line, *more)]


def start(trainings):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN_IN_TURN, json.dumps(trainings)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(*processes):
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "".join(
        output[-2500:] for output in outputs
    )
    return outputs


@pytest.fixture(scope="module")
def trained(toy_data, tmp_path_factory):
    """(folder, log): FAMILY-1 and FAMILY-2 by one and by two processes; `elastic` by two, then by one."""
    folder = tmp_path_factory.mktemp("distributed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = ("--update-freq", 2, "--max-update", UPDATES)
    ones = [arguments(name, toy_data, folder / f"{name}-1", *alone) for name in FAMILIES]

    def twos(rank):
        world = ("--distributed-world-size", 2, "--distributed-rank", rank, "--distributed-no-spawn")
        world += ("--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp")
        world += ("--distributed-init-method", f"tcp://127.0.0.1:{port}")
        lines = [arguments(n, toy_data, folder / f"{n}-2", *world, "--max-update", UPDATES) for n in FAMILIES]
        # In the middle of an epoch, resumed by the two, and left there again.
        for updates in (3, 7):
            lines.append(arguments("moa", toy_data, folder / "elastic", *world, "--max-update", updates))
        return lines

    outputs = finish(start(twos(0)), start(twos(1)))
    finish(start([*ones, arguments("moa", toy_data, folder / "elastic", *alone)]))
    return folder, outputs[0]


def assert_same_model(one, two):
    one, two = (load_checkpoint(folder / "checkpoint_last.pt") for folder in (one, two))
    updates = [state["optimizer_history"][-1]["num_updates"] for state in (one, two)]
    assert updates == [UPDATES, UPDATES]
    for name, tensor in one["model"].items():
        torch.testing.assert_close(
            two["model"][name], tensor, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_the_model_of_one(trained, family):
    folder, _ = trained
    assert_same_model(folder / f"{family}-1", folder / f"{family}-2")


def test_experts_were_idle(trained):
    _, log = trained
    dead = [json.loads(line[line.index("{") :]) for line in log.splitlines() if '"dead_experts"' in line]
    assert any(float(record["dead_experts"]) > 0 for record in dead)


def test_two_processes_resume_and_one_takes_over_in_the_middle_of_an_epoch(trained):
    folder, log = trained
    assert "elastic/checkpoint_last.pt (epoch 1 @ 3 updates)" in log
    assert_same_model(folder / "moa-1", folder / "elastic")


@pytest.mark.parametrize("flags", [SPARSE, (*SPARSE, "--routing-noise"), ("--checkpoint-activations",)])
def test_pytorch_ddp_needs_no_find_unused_parameters(flags, tmp_path):
    """torch's reducer stops at the second step when a parameter of the first got no gradient."""
    from types import SimpleNamespace

    from fairseq.data import Dictionary
    from fairseq.models import MODEL_REGISTRY

    from moa_fairseq.evaluation.skeleton import parse_training_flags

    dictionary = Dictionary()
    for index in range(20):
        dictionary.add_symbol(f"w{index}")
    small = ("--encoder-layers", 1, "--decoder-layers", 1, "--share-all-embeddings")
    line = ["no-data", "--arch", "moa_transformer_tiny", "--task", "translation", *small, *flags]
    args = parse_training_flags([str(word) for word in line], "refused")
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = MODEL_REGISTRY["moa_transformer"].build_model(args, task)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        tokens = torch.full((1, 2), 7)
        for _ in range(2):
            logits, _ = wrapped(tokens, torch.tensor([2]), tokens)
            logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        idle = model.encoder.layers[0].self_attn.q_experts.weight.grad
        if "--num-experts" in flags:
            assert (idle.abs().sum(dim=(1, 2)) == 0).any()
    finally:
        torch.distributed.destroy_process_group()


def test_all_processes_save_when_one_is_terminated(toy_data, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = ("--distributed-world-size", 2, "--distributed-no-spawn", "--distributed-backend", "gloo")
    world += ("--ddp-backend", "legacy_ddp", "--distributed-init-method", f"tcp://127.0.0.1:{port}")
    lines = [
        arguments("moa", toy_data, tmp_path, *world, "--distributed-rank", rank, "--max-epoch", 500)
        for rank in (0, 1)
    ]
    first, second = (start([line]) for line in lines)
    for line in first.stdout:
        if '"epoch": 2' in line:
            second.send_signal(signal.SIGTERM)
            break
    outputs = [process.communicate(timeout=240)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [143, 143], outputs[0][-2000:]
    extra = load_checkpoint(tmp_path / "checkpoint_last.pt")["extra_state"]
    assert extra["train_iterator"]["iterations_in_epoch"] > 0
    assert 0 < extra["previous_training_time"] < 600
