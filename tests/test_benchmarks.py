"""results/benchmarks: the table is fresh and tells the worse half, too; the pictures show every point."""

import argparse
import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("_bench", "attention", "summary"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import attention
    import summary

    return attention, summary


def test_the_summary_is_what_the_records_say(benchmarks):
    assert (RESULTS / "README.md").read_text(encoding="utf-8") == benchmarks[1].document()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_summary_has_the_worst_of_each_ratio(benchmarks, dtype):
    """Time, memory and the sweep over experts, in bfloat16 as in float32."""
    stem = "attention-cpu" + ("" if dtype == "float32" else "-bfloat16")
    found = json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))
    table = "\n".join(benchmarks[1].table())
    rows = [row for batch in found["batches"] for row in batch["rows"].values()]
    for key in ("time_over_dense", "kept_over_dense", "peak_over_dense"):
        assert f"{max(row[key] for row in rows if key in row):.2f}" in table, key
    for times in found["experts_sweep"].values():
        assert f"{max(times.values()) / times['8']:.2f}" in table


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("attention-*.json")), ids=lambda path: path.stem
)
def test_the_picture_of_a_layer_shows_every_point(benchmarks, path):
    found = json.loads(path.read_text(encoding="utf-8"))
    args = argparse.Namespace(device=found["device"], dtype=found["dtype"])
    for panel in benchmarks[0].draw(found["batches"], found["experts_sweep"], args).axes:
        heights = [y for line in panel.lines for y in line.get_ydata()]
        heights += [bar.get_height() for bar in panel.patches]
        assert panel.get_ylim()[0] <= min(heights) and max(heights) <= panel.get_ylim()[1]


@pytest.mark.parametrize(
    ("said", "tokens"), [({}, 1024), ({"train.flags.tokens-per-sample": 1030}, 1030)]
)
def test_decoding_takes_the_length_that_the_first_system_is_trained_with(
    benchmarks, monkeypatch, tmp_path, said, tokens
):
    """1,024 tokens where the recipe names no number, as fairseq does; learned positions reach its end."""
    monkeypatch.delitem(sys.modules, "decoding", raising=False)
    import decoding

    widths = {f"decoder-{part}-dim": 32 for part in ("embed", "input", "output", "ffn-embed")}
    model = {
        **widths,
        "decoder-layers": 1,
        "decoder-attention-heads": 2,
        "decoder-learned-pos": True,
    }
    recipe = {
        "experiment": "tiny",
        "summary": "is not trained",
        "data": {"recipe": "wikitext2_sp4k"},
        "model": {"arch": "dense_transformer_lm_base", "flags": model},
        "train": {"task": "language_modeling", "criterion": "cross_entropy", "max_tokens": 16},
    }
    recipe["train"]["max_update"] = 4
    systems = {"A": {"label": "dense", "recipe": "tiny.yaml", "set": said}}
    study = {"study": "toy", "question": "?", "seeds": 1, "systems": systems}
    for name, content in (("tiny", recipe), ("toy", study)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))

    def take_turns(candidates, rounds, device):
        monkeypatch.setattr(
            decoding, "take_turns", lambda candidates, *_: dict.fromkeys(candidates, 1.0)
        )
        for call in candidates.values():  # of one text
            call()
        return dict.fromkeys(candidates, 1.0)

    monkeypatch.setattr(decoding, "take_turns", take_turns)
    words = [
        "decoding.py",
        str(tmp_path / "toy.yaml"),
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", words)
    decoding.main()
    found = json.loads((tmp_path / "decoding-cpu.json").read_text())
    assert found["tokens"] == tokens and found["seconds_per_token"]["1"] == {
        "A": pytest.approx(1 / tokens)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["generation", "language_models", "decoding"])
def test_a_benchmark_of_whole_models_runs_by_itself(name, tmp_path):
    """Where nothing else has registered the architectures with fairseq before."""
    study = [ROOT / "configs" / "studies" / "control.yaml"] * (name == "decoding")
    command = [
        sys.executable,
        ROOT / "benchmarks" / f"{name}.py",
        *study,
        "--miniature",
        "--rounds",
        "1",
    ]
    subprocess.run(
        [*command, "--output", tmp_path], check=True, capture_output=True, timeout=300
    )
    assert (
        json.loads((tmp_path / f"{name}-cpu.json").read_text(encoding="utf-8"))["benchmark"]
        == name
    )


def imported_names():
    """(file, module, name) of each import from this package in benchmarks/, also inside functions."""
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.startswith("moa_fairseq"):
                for alias in node.names:
                    yield path.name, module, alias.name


def test_benchmarks_import_only_names_that_exist():
    """Imports inside functions count too: a benchmark runs them only when it is started."""
    missing = []
    for file, module, name in imported_names():
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            if error.name.startswith("moa_fairseq"):  # not transformers, timm or Triton
                missing.append((file, module, name))
    assert missing == []
