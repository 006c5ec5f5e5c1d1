"""A new family is a user-dir of its own: nothing else is edited, and every command knows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TOY = TESTS / "toy_family"
ARCH = "parity_transformer_tiny"


def moa_fairseq(*args):
    command = [sys.executable, "-m", "moa_fairseq.cli", "--user-dir", TOY, *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(list(map(str, command)), env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_it_trains_generates_counts_and_is_analysed(fairseq, toy_data, tmp_path):
    flags = ("--max-epoch", 1, "--user-dir", TOY, "--parity-scale", 1.5)
    log = fairseq.train(toy_data, tmp_path, *flags, arch=ARCH).stdout
    assert '"train_max_load"' in log  # the routers' statistics are logged as of any family
    checkpoint = tmp_path / "checkpoint_last.pt"
    generate = ("--path", checkpoint, "--user-dir", TOY, "--cpu", "--beam", 3, "--max-tokens", 400)
    translations = fairseq("generate", toy_data, *generate).stdout
    assert len([line for line in translations.splitlines() if line.startswith("H-")]) == 12

    cost = json.loads(moa_fairseq("complexity", "--arch", ARCH, "--json"))
    dense = json.loads(
        moa_fairseq("complexity", "--arch", "mae_transformer_tiny", "--json", "--", "--mae-gate", "uniform")
    )
    assert cost["macs"] == dense["macs"] and cost["parameters"] == dense["parameters"]

    loads = tmp_path / "loads.json"
    model = ("expert-load", checkpoint, "--data", toy_data, "--subset", "valid", "--cpu")
    moa_fairseq("analyze", *model, "--output", tmp_path / "loads.png", "--json", loads)
    modules = json.loads(loads.read_text())["modules"]
    assert [row["name"] for row in modules] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
    ]
    for row in modules:  # even and odd positions, half of the heads each
        assert abs(row["max_load"] + row["min_load"] - 2 / 8) < 1e-6 and row["dead_experts"] == 0


def test_it_is_small():
    files = list(TOY.glob("*.py"))
    assert len(files) <= 4
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 120
