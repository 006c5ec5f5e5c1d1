"""Training mixtures of heads: the balance loss, gradients, checkpointing, Trainer."""

import copy
import dataclasses
import re
import warnings
from pathlib import Path

import pytest
import torch
from integrations.tiny_models import HEADS, dense, mixture, mixtures_of, tokens
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.heads import balance_loss, collect_routings

routers = pytest.mark.parametrize("router", ("query-norm", "learned"))
SHARED = 2
ACTIVE = 5


def padded(batch=2, length=9, pad=3):
    """Ids, mask and labels [B, T]; the second row has padding on the left."""
    ids = tokens(batch, length)
    ids[1, :pad] = 0
    mask = (ids != 0).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, wanted, tolerance=1e-12):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


def balance_by_hand(routings, mask):
    """Σ over layers of Σ_i P_i · f_i (MoH Eq. 7-8), token by token."""
    total = 0.0
    for routing in routings:
        routed = HEADS - SHARED
        summed_probability = [0.0] * routed
        counts = [0] * routed
        real = [n for n in range(mask.numel()) if mask.reshape(-1)[n]]
        for n in real:
            for head in range(routed):
                summed_probability[head] += float(routing.probs[n, SHARED + head]) / len(real)
            for head in routing.expert_ids[n, SHARED:].tolist():
                counts[head - SHARED] += 1
        total += sum(p * f / len(real) for p, f in zip(summed_probability, counts))
    return total


@routers
@pytest.mark.filterwarnings("ignore:no labels")
def test_the_loss_has_the_balance_of_the_real_tokens(router):
    model = mixture(router=router, balance=0.5).train()
    batch = padded()
    with collect_routings(model) as routings:
        model(**{**batch, "labels": None})
    plain = copy.deepcopy(model)
    plain.config.moh["balance"] = 0
    task = plain(**batch).loss
    term = model(**batch).loss - task
    assert float(term) == pytest.approx(
        0.5 * balance_by_hand(routings, batch["attention_mask"]), rel=1e-5
    )
    assert model(**batch, return_dict=False)[0] == model(**batch).loss
    assert model.eval()(**batch).loss == plain.eval()(**batch).loss


def assert_routings(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert torch.equal(one.expert_ids, other.expert_ids)
        torch.testing.assert_close(one.probs, other.probs, rtol=0, atol=1e-12)


def collected(model, *passes, **inputs):
    with collect_routings(model) as routings:
        for ids in passes:
            model(ids, **inputs)
    return routings


@routers
@pytest.mark.parametrize("mode", ("train", "eval", "no_grad"))
@pytest.mark.filterwarnings("ignore:no labels")
def test_a_block_keeps_every_forward_pass_in_order(router, mode):
    model = mixture(router=router).train(mode == "train")
    passes = [tokens(seed=s, length=5 + s) for s in range(3)]
    with torch.set_grad_enabled(mode != "no_grad"):
        apart = [collected(model, ids) for ids in passes]
        together = collected(model, *passes)
    assert_routings(together, [each for some in apart for each in some])
    assert [each.probs.size(0) for each in together] == [10, 10, 12, 12, 14, 14]
    total = sum(balance_loss(each) for each in apart)
    torch.testing.assert_close(balance_loss(together), total, rtol=1e-6, atol=0)


@routers
def test_a_block_keeps_each_step_of_generation(router):
    model = mixture(router=router)
    ids = tokens(1, 6)
    with collect_routings(model) as routings:
        out = model.generate(
            ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids)
        )
    assert [each.probs.size(0) for each in routings] == [6, 6, 1, 1, 1, 1]
    for whole, steps in zip(collected(model, out[:, :-1]), (routings[::2], routings[1::2])):
        assert torch.equal(
            whole.expert_ids.sort().values,
            torch.cat([s.expert_ids for s in steps]).sort().values,
        )


@routers
def test_a_block_has_nothing_twice(router):
    """Neither what a checkpoint computes again, nor what the training loss's own block collects."""
    model = mixture(router=router, balance=1.0).train()
    batches = [padded(length=length) for length in (9, 8)]
    lists = []
    losses = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with collect_routings(model) as routings, collect_routings(model) as inner:
            for batch in batches:  # gradients add up
                losses.append(model(**batch).loss)
                losses[-1].backward()
        lists += [routings, inner]
    for each in lists:
        assert_routings(each, lists[0])
    assert [each.probs.size(0) for each in lists[0]] == [18, 18, 16, 16]
    assert losses[:2] == losses[2:]


@routers
def test_gradients_reach_what_chooses(router):
    """Without the balance loss, too: gates of 1 pass the gradient of the probabilities."""
    model = mixture(router=router, balance=0).train()
    batch = padded()
    model(**batch).loss.backward()
    found = gradients(model)
    if router == "learned":
        assert all(
            each.router.projection.weight.grad.norm() > 1e-6 for each in mixtures_of(model)
        )
    model.zero_grad()
    for each in mixtures_of(model):
        each.router.register_forward_hook(
            lambda module, args, routing: dataclasses.replace(
                routing, gates=routing.gates.detach()
            )
        )
    model(**batch).loss.backward()
    name = "model.layers.0.self_attn.q_proj.weight"
    if router == "query-norm":
        assert (gradients(model)[name] - found[name]).norm() > 1e-6
    else:
        assert all(each.router.projection.weight.grad is None for each in mixtures_of(model))


@routers
def test_left_padding_leaves_the_loss_as_it_is(router):
    model = mixture(router=router, balance=1.0).train()
    ids = tokens(1, 7)
    alone = model(ids, labels=ids).loss
    row = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
    mask = (row != 0).long()
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    labels = row.masked_fill(mask == 0, -100)
    labels[:, 3] = -100  # alone, no token comes before the first
    found = model(row, labels=labels, **inputs).loss
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)


@routers
def test_checkpointing_is_exact_or_refused(router):
    model = mixture(router=router, balance=1.0).train()
    batch = padded()
    model(**batch).loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch).loss.backward()
    assert_same(gradients(model), wanted)
    copy.deepcopy(
        model
    )  # which a tensor of the graph, left on a module, would not let be copied
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(UserError, match="use_reentrant"):
        model(**batch)
    model.config.moh["balance"] = 0
    model(**batch).loss.backward()


def loss_in_a_block(model, batch, scale):
    """A loss of one's own."""
    with collect_routings(model) as routings:
        out = model.model(batch["input_ids"], batch["attention_mask"])[0]
    return (scale * out).square().mean() + balance_loss(routings, batch["attention_mask"])


@routers
@pytest.mark.parametrize("around", ("loss", "model", "block"))
@pytest.mark.parametrize("layers", (False, True))
@pytest.mark.parametrize("reentrant", (False, True))
def test_a_checkpoint_around_the_loss_is_exact(router, around, layers, reentrant):
    """Its first pass has no gradients if it is reentrant, and its second pass is inside the backward pass."""
    model = mixture(router=router, balance=5.0).train()
    batch = padded()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def run(scale):
        if around == "block":
            return loss_in_a_block(model, batch, scale)
        return scale * model(**batch).loss

    def run_model(embedded):
        given = {**batch, "input_ids": None, "inputs_embeds": embedded}
        return model(**given, return_dict=False)[0]

    wanted = run(scale)
    wanted.backward()
    expected = gradients(model)
    model.zero_grad()
    if layers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if around == "model":
        embedded = model.get_input_embeddings()(batch["input_ids"])
        loss = checkpoint(run_model, embedded, use_reentrant=reentrant)
    else:
        loss = checkpoint(run, scale, use_reentrant=reentrant)
    with torch.no_grad(), collect_routings(model) as again:
        loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    assert_same(gradients(model), expected)
    assert not again


def test_a_pass_without_gradients_has_the_balance():
    model = mixture(balance=5.0).train()
    batch = padded()
    wanted = model(**batch).loss
    with torch.no_grad(), collect_routings(model) as routings:
        loss = model(**batch).loss
    assert loss == wanted and len(routings) == 2


def test_a_pass_without_gradients_is_told_from_a_checkpoint():
    model = mixture(balance=0).train()
    ids = tokens()
    with pytest.raises(UserError, match="no_grad"), collect_routings(model), torch.no_grad():
        model(ids)
    with torch.no_grad(), collect_routings(model) as routings:  # a remedy, and another
        model(ids)
    model.eval()
    with collect_routings(model) as others, torch.no_grad():
        model(ids)
    assert len(routings) == len(others) == 2


@routers
def test_micro_batches_weigh_what_they_hold(router):
    """Equal rows: f and P of the halves are those of the whole, so that the gradients are equal, too."""
    row = tokens(1, 9)
    whole = row.expand(4, -1)
    model = mixture(router=router, balance=1.0).train()
    model(whole, labels=whole).loss.backward()
    wanted = gradients(model)
    for items in (4 * 8, torch.tensor(4 * 8)):
        model.zero_grad()
        for part in (whole[:3], whole[3:]):
            model(part, labels=part, num_items_in_batch=items).loss.backward()
        assert_same(gradients(model), wanted, 1e-6)


def test_inputs_by_place_are_those_by_name():
    model = mixture(balance=1.0).train()
    batch = padded()
    by_place = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
    assert by_place.loss == model(**batch).loss


def test_a_loss_of_ones_own_has_no_balance_and_that_is_said():
    model = mixture().train()
    ids = tokens()
    with pytest.warns(UserWarning, match="no labels"):
        assert model(ids).loss is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.config.moh["balance"] = 0
        model(ids)
        with torch.no_grad():
            model(ids)
        model.eval()(ids)


def test_autocast():
    model = mixture(router="learned", balance=1.0, changes={"dtype": torch.float32}).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**padded()).loss
    loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


class Rows(torch.utils.data.Dataset):
    """The same row again and again, or different ones; a column that no model reads."""

    def __init__(self, count, equal=False):
        self.ids = tokens(1, 9).expand(count, -1) if equal else tokens(count, 9)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        return {
            "input_ids": self.ids[place],
            "labels": self.ids[place],
            "other": torch.tensor(place),
        }


def trainer(model, folder, rows, **changes):
    """Plain SGD on the CPU, without reports."""
    settings = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    return Trainer(model, TrainingArguments(**{**settings, **changes}), train_dataset=rows)


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@routers
def test_trainer_accumulates(router, tmp_path):
    results = []
    for size, steps in ((4, 1), (1, 4)):
        model = mixture(router=router, balance=1.0).train()
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer(model, tmp_path, Rows(4, equal=True), **options).train()
        results.append(weights(model))
    assert_same(results[1], results[0], 1e-6)
    assert (results[0]["lm_head.weight"] - mixture(router=router).lm_head.weight).norm() > 1e-3


def test_trainer_resumes(tmp_path):
    options = {
        "optim": "adamw_torch",
        "save_steps": 2,
        "save_strategy": "steps",
        "max_steps": 4,
    }
    whole = mixture(router="learned").train()
    trainer(whole, tmp_path, Rows(16), **options).train()
    again = mixture(router="learned", seed=9).train()
    trainer(again, tmp_path, Rows(16), **options).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    assert_same(weights(again), weights(whole), 0)


def test_trainer_evaluates_without_the_balance(tmp_path):
    """4.57 divides by another number of tokens, for dense models too, so that only results are compared."""
    models = [mixture(balance=balance).train() for balance in (10.0, 0.0)]
    losses = [
        trainer(model, tmp_path, Rows(4)).evaluate(Rows(4))["eval_loss"] for model in models
    ]
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:no labels")
def test_label_smoothing_predicts_the_next_token(tmp_path):
    """Trainer shifts the labels of the classes that it knows by name."""
    model = mixture().train()
    ids = tokens(4, 9)
    tool = trainer(model, tmp_path, Rows(4), label_smoothing_factor=0.1)
    found = tool.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    scores = model(ids).logits[:, :-1].flatten(0, 1)
    smooth = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    torch.testing.assert_close(found, smooth(scores, ids[:, 1:].flatten()), rtol=0, atol=1e-6)


def test_the_guide_can_be_followed(tmp_path, monkeypatch):
    guide = (Path(__file__).resolve().parents[2] / "docs" / "huggingface.md").read_text(
        encoding="utf-8"
    )
    (example,) = re.findall(
        r"```python\n(import moa_fairseq.integrations.hf.*?)```", guide, re.S
    )
    monkeypatch.chdir(tmp_path)
    dense(dtype=torch.float32).save_pretrained("my-llama")
    names = {"rows": Rows(8)}
    exec(example.replace("max_steps=1000", "max_steps=1"), names)
    assert type(names["model"]).__name__ == "MoHLlamaForCausalLM"
    assert [each.sizes.tolist() for each in mixtures_of(names["model"])] == [[4, 6, 1]] * 2
