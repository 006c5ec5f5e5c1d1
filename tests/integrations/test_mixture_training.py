"""Exported models in what transformers' users train with: resuming, PEFT, torch.compile, two processes."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from integrations.test_mixture_transformer import ROOT, load, rows_of
from transformers import AutoModelForSeq2SeqLM, Trainer, TrainingArguments


def train(model, rows, folder, resume=False, processes=1, **settings):
    """The losses that Trainer logs, one an update, which reads all rows."""
    size = len(rows["input_ids"])
    data = [{key: value[row] for key, value in rows.items()} for row in range(size)]
    each = size // processes
    words = {
        **{
            "output_dir": str(folder),
            "max_steps": 4,
            "per_device_train_batch_size": each,
            "logging_steps": 1,
        },
        **{
            "report_to": "none",
            "use_cpu": True,
            "remove_unused_columns": False,
            "disable_tqdm": True,
        },
    }
    trainer = Trainer(model, TrainingArguments(**words, **settings), train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_resumed_training_has_the_losses_of_one_that_was_not_interrupted(folders, tmp_path):
    model, reference = load(folders / "moa")
    rows = rows_of(reference, "moa")
    whole = train(model, rows, tmp_path, save_steps=2)
    other, _ = load(folders / "moa")
    resumed = train(other, rows, tmp_path / "other", resume=str(tmp_path / "checkpoint-2"))
    assert whole[-1] < whole[0]
    assert resumed == whole


def test_an_adapter_of_peft_is_trained_and_read_again(folders, tmp_path):
    peft = pytest.importorskip("peft")
    model, reference = load(folders / "moa")
    rows = rows_of(reference, "moa")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["fc1", "fc2"]))
    losses = train(adapted, rows, tmp_path, learning_rate=0.01, save_strategy="no")
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path / "adapter")
    base, _ = load(folders / "moa")
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, before[name])
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    rows.pop("labels")
    with torch.no_grad():
        torch.testing.assert_close(again(**rows).logits, adapted.eval()(**rows).logits)


def test_a_compiled_model_has_the_same_logits(folders):
    model, reference = load(folders / "moa")
    rows = rows_of(reference, "moa")
    with torch.no_grad():
        expected = model(**rows)
        found = torch.compile(model, backend="aot_eager")(**rows)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.loss, expected.loss)


TWO_PROCESSES = """
    import json, os, sys
    import torch
    sys.path.insert(0, "tests")
    from pathlib import Path
    from integrations.test_mixture_training import sums, train, twice
    from integrations.test_mixture_transformer import load, rows_of
    model, reference = load(Path(sys.argv[1]))
    rows = twice(rows_of(reference, "dense"))
    losses = train(model, rows, sys.argv[2], processes=2, ddp_backend="gloo", save_strategy="no")
    Path(sys.argv[2], "rank" + os.environ["RANK"]).write_text(json.dumps([losses, sums(model)]))
"""


def twice(rows):
    return {key: torch.cat([value, value]) for key, value in rows.items()}


def sums(model):
    return [float(tensor.double().sum()) for tensor in model.state_dict().values()]


def test_two_processes_train_like_one(folders, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES), encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29541",
    ]
    done = subprocess.run(
        [*words, script, folders / "dense", tmp_path], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (_, first), (_, second) = (
        json.loads((tmp_path / f"rank{rank}").read_text(encoding="utf-8")) for rank in (0, 1)
    )
    assert first == second
    model, reference = load(folders / "dense")
    start = sums(model)
    losses = train(model, twice(rows_of(reference, "dense")), tmp_path, save_strategy="no")
    assert losses[-1] < losses[0]
    assert sums(model) != pytest.approx(start, rel=1e-6)
    assert sums(model) == pytest.approx(first, rel=1e-6, abs=1e-6)


def test_generation_settings_follow_a_saved_model(folders, tmp_path):
    model, _ = load(folders / "moa")
    model.save_pretrained(tmp_path)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config.num_beams == 4
