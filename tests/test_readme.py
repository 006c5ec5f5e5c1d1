"""What the README says can be typed, can be typed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import options

from moa_fairseq.cli import VERBS, main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_scripts_and_linked_files_exist():
    scripts = set(re.findall(r"(?:scripts|data-prep)/[\w-]+\.sh", README))
    links = set(re.findall(r"\]\((?!http)([^)]+)\)", README))
    assert len(scripts) >= 5 and links
    missing = [name for name in scripts | links if not (ROOT / name).exists()]
    assert not missing


def test_verbs_are_verbs_and_each_has_help(capsys):
    named = {
        words[1] for line in README.splitlines() for words in [line.split()] if words[:1] == ["moa-fairseq"]
    }
    named |= set(re.findall(r"`moa-fairseq (\w+)", README))
    assert named and named <= set(VERBS)
    for verb in VERBS:
        with pytest.raises(SystemExit) as stop:
            main([verb, "--help"])
        assert stop.value.code == 0 and "usage: moa-fairseq" in capsys.readouterr().out


def test_flags_of_the_table_are_flags():
    table = README.split("## Flags")[1].split("## ")[0]
    flags = set(re.findall(r"`(--[\w-]+)", table)) - {"--tensorboard-logdir"}
    parser = options.get_training_parser()
    model = ["data", "--arch", "moa_transformer_base"]
    model += ["--criterion", "label_smoothed_cross_entropy_with_routing"]
    args = options.parse_args_and_arch(parser, model)
    known = {"--" + name.replace("_", "-") for name in vars(args)} | {"--no-expert-bias"}
    assert len(flags) >= 10 and flags <= known | {"--chain"}, flags - known


def test_dry_run_lines_print_commands():
    lines = [line for text in blocks("bash") for line in text.splitlines() if "--dry-run" in line]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)
        config = ROOT / "configs" / f"{Path(words[1]).stem}.yaml"
        command = [sys.executable, "-m", "moa_fairseq.cli", "recipe", str(config), *words[2:]]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0 and "$ fairseq-train" in done.stdout, done.stderr


def test_the_python_example_trains():
    namespace = {}
    (example,) = blocks("python")
    exec(example, namespace)
    ((_, decision),) = namespace["decisions"]
    assert decision.expert_index.shape == (80, 8) and decision.num_experts == 32
    namespace["loss"].backward()
    block = namespace["Block"](32)
    x = torch.randn(5, 2, 32)
    assert block(x, torch.zeros(2, 5, dtype=torch.bool)).shape == x.shape
