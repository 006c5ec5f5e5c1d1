"""Exported models in transformers compute, generate and learn what fairseq's do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from integrations.tiny_models import VERSION  # skips where there is no transformers
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    Trainer,
    TrainingArguments,
)

from moa_fairseq.errors import UserError
from moa_fairseq.integrations import mixture_transformer

assert VERSION
ROOT = Path(__file__).resolve().parents[2]
PAD = 1
TRANSLATIONS = ("moa", "mae", "moh", "switchhead", "gqe", "namoh", "dense", "fairseq")
CAUSAL = ("latent-lm", "moa-lm", "mae-lm", "switchall-lm", "adaptive-lm")
MASKED = ("moa-mlm", "moh-mlm")


def load(folder):
    name = folder.name
    auto = AutoModelForSeq2SeqLM
    if name.endswith("lm"):
        auto = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float64).eval()
    return model, load_file(folder / "reference")


def inputs_of(reference, name):
    ids = reference["src_tokens"]
    if name in TRANSLATIONS:
        return {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}
    return {"input_ids": ids}


@pytest.mark.parametrize("name", TRANSLATIONS + CAUSAL + MASKED)
def test_logits_are_fairseqs(folders, name):
    model, reference = load(folders / name)
    inputs = inputs_of(reference, name)
    read = reference["src_tokens"]
    if name in TRANSLATIONS:
        read = inputs["decoder_input_ids"] = reference["prev_output_tokens"]
    with torch.no_grad():
        logits = model(**inputs).logits
    real = read.ne(PAD)
    # Fairseq's own attention takes its softmax in float32
    atol = 1e-6 if name == "fairseq" else 1e-10
    torch.testing.assert_close(logits[real], reference["logits"][real], rtol=0, atol=atol)


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_generate_gives_the_hypotheses_of_fairseqs_beam_search(folders, name):
    model, reference = load(folders / name)
    words = {"return_dict_in_generate": True, "output_scores": True}
    out = model.generate(**inputs_of(reference, name), **words)
    assert torch.equal(out.sequences[:, 1:], reference["best"])
    torch.testing.assert_close(
        out.sequences_scores.float(), reference["score"], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_changes_no_text_nor_does_padding_before_it(folders, name):
    model, reference = load(folders / name)
    ids = reference["src_tokens"][:, :4]
    words = {"num_beams": 1, "do_sample": False, "max_new_tokens": 5}
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **words)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **words), whole)
    padded = torch.cat([torch.full_like(ids[:, :2], PAD), ids], 1)
    found = model.generate(padded, attention_mask=padded.ne(PAD).long(), **words)
    assert torch.equal(found[:, 2:], whole)


def rows_of(reference, name):
    """One batch for every update of Trainer, as fairseq's criterion read it."""
    target = reference["target"].masked_fill(reference["target"].eq(PAD), -100)
    rows = {"input_ids": reference["src_tokens"]}
    if name in TRANSLATIONS:
        rows |= {"labels": target, "decoder_input_ids": reference["prev_output_tokens"]}
    elif name in CAUSAL:
        rows["shift_labels"] = target
    else:
        rows["labels"] = target
    return rows


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize(
    "name", ("moa", "moh", "switchall-lm", "adaptive-lm", "moa-mlm", "fairseq")
)
def test_ten_updates_have_fairseqs_losses(folders, tmp_path, name, checkpointing):
    model, reference = load(folders / name)
    rows = rows_of(reference, name)
    if checkpointing:
        model.gradient_checkpointing_enable()
    losses = []

    class Recorded(Trainer):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            losses.append(found.detach())
            return found

    data = [{key: value[row] for key, value in rows.items()} for row in range(3)]
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=len(reference["losses"]),
        per_device_train_batch_size=3,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = Recorded(model, settings, train_dataset=data, optimizers=(adam, None))
    # in the order of fairseq's batch, which the float32 of its log-softmax reads
    trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(data)
    trainer.train()
    found = torch.stack(losses).float()
    torch.testing.assert_close(found[0], reference["losses"][0].float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, reference["losses"].float(), rtol=1e-4, atol=0)


def test_labels_alone_make_what_the_decoder_reads(folders):
    model, reference = load(folders / "moa")
    rows = rows_of(reference, "moa")
    made = model.prepare_decoder_input_ids_from_labels(rows["labels"])
    assert torch.equal(made[:, 1:], rows["decoder_input_ids"][:, 1:])
    assert made[:, 0].eq(2).all()


def test_a_saved_model_is_the_same_and_another_class_is_refused(folders, tmp_path):
    model, reference = load(folders / "moa")
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype="auto")  # the default from 5
    assert again.dtype == torch.float64
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    with pytest.raises(UserError, match="AutoModelForSeq2SeqLM"):
        AutoModelForCausalLM.from_pretrained(folders / "moa")
    with pytest.raises(UserError, match="cache_implementation"):
        model.generate(reference["src_tokens"], cache_implementation="static")


def test_without_fairseq():
    code = f"import sys; sys.modules['fairseq'] = None; import {mixture_transformer.__name__}"
    assert subprocess.call([sys.executable, "-c", code], cwd=ROOT) == 0
