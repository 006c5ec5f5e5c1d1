"""Two processes train what one trains with the same global batches, for each way of training."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_REGISTRY

from moa_fairseq.experiments.scoring.meta_model import parse_training_flags
from moa_fairseq.plugin.fairseq_compat import load_checkpoint

# 16 experts of which a token picks one, and batches of few tokens: some experts are idle in every batch
SPARSE = ("--num-experts", 16, "--experts-per-token", 1)
PLAIN = ("--criterion", "label_smoothed_cross_entropy")
# (a large epsilon: Adam would blow the rounding errors of vanishing gradients up to whole steps)
MAE = ("mae_transformer_tiny", *PLAIN, "--gate-dropout", 0, "--adam-eps", 1e-4)
# the second of three epochs has G steps; one process has no micro-batch left in the last update of each
BCD = (
    *MAE,
    "--task",
    "translation_bcd",
    "--bcd-g-every",
    2,
    "--max-tokens",
    100,
    "--max-epoch",
    3,
)
SMALL = ("--max-tokens", 60, "--max-update", 10)
# arch, flags, what the log says
FAMILIES = {
    "moa": ("moa_transformer_tiny", *SPARSE, *SMALL, '"dead_experts"'),
    "switchhead": (
        *("switchhead_transformer_tiny", *SPARSE, *SMALL, "--switchhead-experts", "vkqo"),
        '"dead_experts"',
    ),
    "bcd": (*BCD, '"bcd_step": "GF"'),
    "joint": (*BCD, "--bcd", "none", '"gate_entropy"'),
}
# dropout's noise would depend on the processes
STILL = ("--dropout", 0, "--lr", 0.001, "--no-epoch-checkpoints")


def assert_same_model(one, two):
    one, two = (load_checkpoint(folder / "checkpoint_last.pt") for folder in (one, two))
    updates = [state["optimizer_history"][-1]["num_updates"] for state in (one, two)]
    assert updates[0] == updates[1] >= 8
    torch.testing.assert_close(two["model"], one["model"], rtol=2e-3, atol=2e-4)


@pytest.mark.thorough(keep="[moa]")
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_the_model_of_one(fairseq, toy_data, tmp_path, family):
    arch, *flags, said = FAMILIES[family]
    fairseq.train(toy_data, tmp_path / "one", *flags, *STILL, "--update-freq", 2, arch=arch)
    log = fairseq.together(
        *fairseq.words(toy_data, tmp_path / "two", *flags, *STILL, arch=arch)
    )
    assert_same_model(tmp_path / "one", tmp_path / "two")
    lines = [line for line in log.splitlines() if said in line]
    assert lines
    if "dead" in said:  # experts were idle
        assert any(
            float(json.loads(line[line.index("{") :])["dead_experts"]) > 0 for line in lines
        )


@pytest.mark.thorough
def test_another_number_of_processes_goes_on_in_the_middle_of_an_epoch(
    fairseq, toy_data, tmp_path
):
    """Left there by two, resumed by two, left again, and taken over by one."""
    arch, *flags, _ = FAMILIES["moa"]
    fairseq.train(toy_data, tmp_path / "one", *flags, *STILL, "--update-freq", 2, arch=arch)
    for updates in (3, 7):
        words = fairseq.words(
            toy_data, tmp_path / "elastic", *flags, *STILL, "--max-update", updates
        )
        log = fairseq.together(*words)
    assert "elastic/checkpoint_last.pt (epoch 1 @ 3 updates)" in log
    fairseq.train(toy_data, tmp_path / "elastic", *flags, *STILL, "--update-freq", 2)
    assert_same_model(tmp_path / "one", tmp_path / "elastic")


@pytest.mark.parametrize(
    "flags", [SPARSE, (*SPARSE, "--routing-noise"), ("--checkpoint-activations",)]
)
def test_pytorch_ddp_needs_no_find_unused_parameters(flags, tmp_path):
    """torch's reducer stops at the second step when a parameter of the first got no gradient."""
    dictionary = Dictionary()
    for index in range(20):
        dictionary.add_symbol(f"w{index}")
    small = ("--encoder-layers", 1, "--decoder-layers", 1, "--share-all-embeddings")
    line = [
        "no-data",
        "--arch",
        "moa_transformer_tiny",
        "--task",
        "translation",
        *small,
        *flags,
    ]
    args = parse_training_flags([str(word) for word in line], "refused")
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = MODEL_REGISTRY["moa_transformer"].build_model(args, task)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
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


def test_all_processes_save_when_one_is_terminated(fairseq, toy_data, tmp_path):
    flags = (*SPARSE, "--max-tokens", 60, "--max-epoch", 500, "--no-epoch-checkpoints")
    pair = fairseq.pair(*fairseq.words(toy_data, tmp_path, *flags))
    pair[0].said_until('"epoch": 2')
    pair[1].send_signal(signal.SIGTERM)
    assert [each.end().returncode for each in pair] == [143, 143]
    extra = load_checkpoint(tmp_path / "checkpoint_last.pt")["extra_state"]
    assert extra["train_iterator"]["iterations_in_epoch"] > 0
    assert 0 < extra["previous_training_time"] < 600
