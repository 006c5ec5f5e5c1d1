"""Two processes train the model that one trains, in block coordinate descent and jointly."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from moa_fairseq.fairseq_compat import load_checkpoint

# three epochs, the second one with G steps; one worker has no micro-batch left in the last update of each
BCD = ("--task", "translation_bcd", "--bcd-g-every", 2, "--criterion", "label_smoothed_cross_entropy")
# (a large epsilon: Adam would blow the rounding errors of vanishing gradients up to whole steps)
BCD += ("--max-tokens", 100, "--max-epoch", 3, "--dropout", 0, "--gate-dropout", 0, "--adam-eps", 1e-4)
NOBCD = (*BCD, "--bcd", "none")
CASES = {
    "bcd": ("mae_transformer_tiny", BCD, '"bcd_step": "GF"'),
    "joint": ("mae_transformer_tiny", NOBCD, '"gate_entropy"'),
}


@pytest.mark.parametrize("case", CASES)
def test_two_workers_train_one_model(fairseq, toy_data, tmp_path, case):
    arch, flags, logged = CASES[case]
    single = fairseq.train(toy_data, tmp_path / "single", *flags, "--update-freq", 2, arch=arch)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = [sys.executable, "-m", "fairseq_cli.train", *map(str, single.args[3:])]
    base[base.index(str(tmp_path / "single"))] = str(tmp_path / "double")
    del base[base.index("--update-freq") : base.index("--update-freq") + 2]
    base += ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--distributed-world-size", "2"]
    base += ["--distributed-no-spawn", "--distributed-init-method", f"tcp://127.0.0.1:{port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    workers = [
        subprocess.Popen(
            [*base, "--distributed-rank", str(rank)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs[0][-2000:] + outputs[1][-2000:]
    assert logged in outputs[0]
    one, two = (load_checkpoint(tmp_path / name / "checkpoint_last.pt") for name in ("single", "double"))
    updates = two["optimizer_history"][-1]["num_updates"]
    assert updates == one["optimizer_history"][-1]["num_updates"] >= 8
    # the same global batches: two workers' micro-batches are one worker's two
    for name, tensor in one["model"].items():
        torch.testing.assert_close(
            two["model"][name], tensor, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
