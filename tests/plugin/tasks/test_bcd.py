"""Block coordinate descent, step by step: what a G step moves, what an F step moves, and by how much."""

import copy
import math

import pytest
import torch
from fairseq.logging import metrics
from trainer_updates import (
    EVERY_SECOND,
    F_EPOCH,
    G_EPOCH,
    HALF,
    changed,
    is_gate,
    is_statistic,
    manual_gate_gradient,
    snapshot,
    statistics,
    update,
)

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.train_log import TrainLog
from moa_fairseq.layers.expert_draw import ExpertDraw
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.layers.running_statistics import forgetting, running_statistics_of
from moa_fairseq.layers.sequence_gate import gates_of
from moa_fairseq.plugin.coordinate_descent.finetuning import METHODS, freeze_rest, updated_by
from moa_fairseq.plugin.coordinate_descent.gate_sgd import GateGradients, GateSGD
from moa_fairseq.plugin.coordinate_descent.task import (
    BlockCoordinateDescent,
    BlockCoordinateDescentConfig,
)
from moa_fairseq.plugin.fairseq_compat import load_checkpoint
from moa_fairseq.plugin.forward_context import collect_routings, forward_context


def test_an_update_that_fairseq_repeats_takes_no_second_g_step(build_trainer):
    """As with --amp after an overflow: fairseq calls the task again with the same list."""
    trainer, samples = build_trainer(*EVERY_SECOND, "--gate-dropout", 0)
    micro_batches = samples[:2]
    trainer.begin_epoch(G_EPOCH)
    trainer.task.before_update(trainer, micro_batches)
    before = snapshot(trainer)
    trainer.task.before_update(trainer, micro_batches)
    assert not changed(before, snapshot(trainer))
    trainer.task.before_update(
        trainer, list(micro_batches)
    )  # the same batches in the next epoch
    assert changed(before, snapshot(trainer))


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
def test_a_g_step_is_plain_sgd_on_the_gates_alone(build_trainer, clip):
    trainer, samples = build_trainer(
        *EVERY_SECOND,
        "--gate-dropout",
        0,
        "--gate-lr",
        0.5,
        "--gate-clip-norm",
        clip,
        "--weight-decay",
        0.1,
    )
    update(trainer, F_EPOCH, samples[:1])  # Adam has moments now
    before = snapshot(trainer)
    adam = copy.deepcopy(trainer.optimizer.state_dict())
    expected = manual_gate_gradient(trainer, samples[:2])
    trainer.begin_epoch(G_EPOCH)
    trainer.zero_grad()
    # {}: at an epoch's end this worker has no third
    trainer.task.before_update(trainer, [*samples[:2], {}])
    after = snapshot(trainer)

    assert {name for name in changed(before, after)} == {
        name for name in before if is_gate(name)
    }
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    factor = min(1.0, clip / norm) if clip else 1.0
    assert (factor < 1) == (clip == 0.01)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            after[name], before[name] - 0.5 * factor * gradient, rtol=1e-5, atol=1e-7
        )
    again = trainer.optimizer.state_dict()
    assert again["state"] and again["param_groups"] == adam["param_groups"]
    for key, state in adam["state"].items():
        assert all(
            torch.equal(value, again["state"][key][name])
            for name, value in state.items()
            if torch.is_tensor(value)
        )
    assert all(p.grad is None for p in trainer.get_model().parameters())
    assert not any(
        p.requires_grad for gate in gates_of(trainer.get_model()) for p in gate.parameters()
    )


def test_a_g_steps_dropout_follows_from_the_update_alone(build_trainer):
    """A training that was resumed has drawn other numbers before."""
    left = []
    for drawn in (0, 7):
        trainer, samples = build_trainer(*EVERY_SECOND, "--gate-dropout", 0.5)
        trainer.begin_epoch(G_EPOCH)
        torch.rand(drawn)
        trainer.task.before_update(trainer, samples[:1])
        left.append(snapshot(trainer))
    assert not changed(*left)


def test_an_f_step_moves_all_but_the_gates(build_trainer):
    trainer, samples = build_trainer(*EVERY_SECOND, "--weight-decay", 0.1)
    optimized = sum(p.numel() for p in trainer.optimizer.params)
    gates = sum(p.numel() for gate in gates_of(trainer.get_model()) for p in gate.parameters())
    assert optimized + gates == sum(p.numel() for p in trainer.get_model().parameters())
    before = snapshot(trainer)
    log = update(trainer, F_EPOCH, samples[:2])
    moved = changed(before, snapshot(trainer))
    # Embeddings are tied, so one tensor has three names. A key's bias shifts all scores of a softmax
    # alike: its gradient is a rounding error, or zero.
    parameters = {n for n, _ in trainer.get_model().named_parameters(remove_duplicate=False)}
    expected = {n for n in parameters if not is_gate(n) and "k_proj.bias" not in n}
    expected |= {n for n in before if is_statistic(n)}
    assert {n for n in moved if "k_proj.bias" not in n} == expected
    assert log["bcd_step"] == "F" and "g_loss" not in log


def test_the_draw_uses_the_gates_that_the_g_step_has_just_updated(build_trainer, monkeypatch):
    flags = (*EVERY_SECOND, "--gate-dropout", 0, "--gate-lr", 50)
    first, samples = build_trainer(*flags)
    second, _ = build_trainer(*flags)
    first.begin_epoch(G_EPOCH)

    def probabilities():
        with torch.no_grad(), collect_routings() as decisions:
            first.get_model().eval()(**samples[0]["net_input"])
        return {name: decision.probs for name, decision in decisions}

    stale = probabilities()
    with torch.no_grad(), forgetting(running_statistics_of(first.get_model())):
        loss, tokens, _ = first.get_criterion()(first.get_model().train(), samples[0])
    first.task.before_update(first, samples[:1])
    fresh = probabilities()
    drawn = {}
    choose = ExpertDraw.choose

    def spy(self, name, probs):
        drawn[name] = (probs.flatten(0, -2), choose(self, name, probs), self)
        return drawn[name][1]

    monkeypatch.setattr(ExpertDraw, "choose", spy)
    log = update(second, G_EPOCH, samples[:1])
    assert log["bcd_step"] == "GF"
    assert log["g_loss"] == pytest.approx(
        float(loss) / tokens / math.log(2), abs=1e-3
    )  # in bits
    # Modules that stand on a drawn one see other inputs: the first of the encoder tells.
    name = "encoder.layers.0.self_attn"
    torch.testing.assert_close(drawn[name][0], fresh[name], rtol=1e-4, atol=1e-5)
    assert (drawn[name][0] - stale[name]).abs().max() > 1e-3
    assert drawn[name][1].shape == (samples[0]["id"].numel(), 1)  # one expert per sequence
    assert set(drawn) == {name, "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"}
    assert drawn[name][2].update == 0 and drawn[name][2].seed == 7
    assert torch.equal(drawn[name][2].sequence_ids, samples[0]["id"])


def test_a_whole_update_is_a_g_step_and_then_an_f_step(build_trainer):
    flags = (*EVERY_SECOND, "--gate-dropout", 0)
    both, samples = build_trainer(*flags)
    apart, _ = build_trainer(*flags)
    update(both, G_EPOCH, samples[:2])
    apart.begin_epoch(G_EPOCH)
    apart.task.before_update(apart, samples[:2])
    update(apart, F_EPOCH, samples[:2])
    assert not changed(snapshot(both), snapshot(apart))


def test_gates_observe_in_f_steps(build_trainer):
    """The first encoder layer's gate sees embeddings, which no draw touches: its statistics are known."""
    trainer, samples = build_trainer(*EVERY_SECOND)
    encoder = trainer.get_model().encoder
    means = []
    with torch.no_grad():
        for sample in samples[:2]:
            source = sample["net_input"]["src_tokens"]
            x, _ = encoder.forward_embedding(source)
            real = source.ne(encoder.padding_idx).unsqueeze(-1)
            means.append((x * real).sum(1) / real.sum(1))
    rows = torch.cat(means)
    update(trainer, F_EPOCH, samples[:2])
    norm = encoder.layers[0].self_attn.gate.norm
    assert norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, rows.mean(0) / 2, rtol=1e-4, atol=1e-5)
    expected = (rows.var(0, unbiased=False) + 1) / 2
    torch.testing.assert_close(norm.running_var, expected, rtol=1e-4, atol=1e-5)
    assert all(gate.norm.num_batches_tracked == 1 for gate in gates_of(trainer.get_model()))
    update(trainer, G_EPOCH, samples[2:3])  # in its G step and in its F step
    assert norm.num_batches_tracked == 3


@pytest.mark.parametrize("joint", [(), ("--bcd", "none")])
def test_a_batch_that_only_fills_a_gap_is_not_observed(build_trainer, joint):
    seen = []
    for gap in ([], [{}]):  # what a worker is given that has no micro-batch left
        trainer, samples = build_trainer(*EVERY_SECOND, "--gate-dropout", 0, *joint)
        update(trainer, F_EPOCH, [*gap, samples[1]])
        seen.append(statistics(trainer))
    assert seen[0].keys() and all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_what_each_method_of_fine_tuning_updates():
    model = torch.nn.Sequential(
        MixtureOfAttentiveExperts(8, 2, causal=True), torch.nn.Linear(8, 8)
    )
    every = [*model.parameters()]
    gate = [*model[0].gate.parameters()]
    expected = {
        "all": every,
        "ftall": every,
        "ftg": gate,
        "ftg_plus": [*gate, model[0].out_proj.weight],
    }
    assert {*expected} == {*METHODS}
    for method, parameters in expected.items():
        freeze_rest(model.requires_grad_(True), method)
        found = [{id(p) for p in each} for each in (parameters, updated_by(model, method))]
        assert found == [{id(p) for p in every if p.requires_grad}] * 2, method


def test_a_gate_that_a_pass_leaves_out_has_no_gradient():
    """As with --encoder-layerdrop."""
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    gradients = GateGradients([used, unused])
    gradients.add(3 * used.sum(), 2.0)
    assert [part.tolist() for part in gradients.mean()] == [[1.5, 1.5], [0.0, 0.0]]


class Epochs:
    """Stands for fairseq's task."""

    def begin_epoch(self, epoch, model):
        pass


class Task(BlockCoordinateDescent, Epochs):
    cfg = BlockCoordinateDescentConfig(finetune="ftg")


def test_a_recipe_reads_the_number_of_trained_parameters(tmp_path, caplog):
    caplog.set_level("INFO")
    model = MixtureOfAttentiveExperts(8, 2, causal=True)
    gate, total = (sum(map(torch.numel, part.parameters())) for part in (model.gate, model))
    Task().begin_epoch(1, model)
    log = TrainLog(tmp_path / "train.jsonl", max_epoch=2, max_update=None)
    for message in caplog.messages:
        log(message)
    assert log.updated == gate < total


def poisoned(trainer, value=math.nan):
    """A weight of the first gate is not a number any more."""
    with torch.no_grad():
        next(gates_of(trainer.get_model())[0].parameters()).view(-1)[0] = value


@pytest.mark.thorough(keep=("nan-float32", "inf-fp16", "nan-bf16"))
@pytest.mark.parametrize(
    "common", [{}, HALF["fp16"], HALF["bf16"]], ids=["float32", "fp16", "bf16"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_gate_ends_the_training_at_its_next_step(build_trainer, common, value):
    trainer, samples = build_trainer(*EVERY_SECOND, common=common)
    update(trainer, G_EPOCH, samples[:1])
    poisoned(trainer, value)
    with pytest.raises(UserError, match=r"gates have diverged.*--gate-lr \(now 1\)"):
        update(trainer, G_EPOCH, samples[:1])


def test_a_poisoned_gate_that_takes_no_step_is_never_saved(build_trainer, tmp_path):
    """F steps draw experts from it and change nothing in it."""
    trainer, samples = build_trainer(*EVERY_SECOND)
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(tmp_path / "checkpoint_last.pt"), {})
    poisoned(trainer)
    update(trainer, F_EPOCH, samples[:1])
    with pytest.raises(UserError, match=r"was not written.*NaN in .*gate"):
        trainer.save_checkpoint(str(tmp_path / "checkpoint_last.pt"), {})
    state = load_checkpoint(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 0


def test_a_step_that_no_float_can_hold_ends_the_training(build_trainer):
    trainer, samples = build_trainer(*EVERY_SECOND, "--gate-lr", 1e40)
    with pytest.raises(UserError, match=r"--gate-lr \(now 1e\+40\)"):
        for _ in range(20):
            update(trainer, G_EPOCH, samples[:1])


@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_that_overflow_are_skipped_in_half_precision_only(scaled):
    """And not for ever: fairseq's own scaler gives up, too."""
    gate = torch.nn.Parameter(torch.ones(3))
    sgd = GateSGD(1.0, 0.0)
    skips = 0

    def step(value):
        gradients = GateGradients([gate])
        gradients.accumulate([torch.full((3,), value)], 1)
        with metrics.aggregate(new_root=True) as log:
            sgd.step(gradients, gradients.all_reduce(), scaled)
        return log.get_smoothed_values()

    assert step(0.25)["g_skipped"] == 0 and gate.tolist() == [0.75] * 3
    with pytest.raises(UserError, match="gates have diverged"):
        while skips < 1000:
            assert step(math.inf)["g_skipped"] == 1
            skips += 1
            if skips == 10:
                step(0.0)  # one good step, and the count begins again
    assert gate.tolist() == [0.75] * 3
    assert skips == (10 + GateSGD.MOST_SKIPPED - 1 if scaled else 0)


@pytest.mark.parametrize("joint", [(), ("--bcd", "none")])
def test_a_skipped_update_leaves_no_trace(build_trainer, monkeypatch, joint):
    # Fairseq's, on its way out of an overflow
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    seen = []
    for scale in (2**7, 2**40):
        common = {**HALF["fp16"], "fp16_init_scale": scale}
        trainer, samples = build_trainer(
            *EVERY_SECOND, "--gate-dropout", 0, *joint, common=common
        )
        before = snapshot(trainer)
        if scale > 2**7:
            update(trainer, F_EPOCH, samples[:1])
            assert trainer.get_num_updates() == 0 and not changed(before, snapshot(trainer))
            trainer.optimizer.scaler.loss_scale = 2.0**7
        update(trainer, F_EPOCH, samples[1:2])
        assert trainer.get_num_updates() == 1
        seen.append(snapshot(trainer))
    assert not changed(*seen)  # nothing is left of the update that was skipped


def test_the_batchs_own_statistics_train_encoder_gates_only(build_trainer):
    """In a G step; a draw depends on its own sequence alone, and evaluation on no batch."""
    flags = (*EVERY_SECOND, "--gate-dropout", 0, "--gate-norm", "batch", "--decoder-layers", 2)
    trainer, samples = build_trainer(*flags)
    model = trainer.get_model()
    kinds = {m.name: m.gate.norm.statistics for m in model.modules() if hasattr(m, "gate")}
    assert kinds.pop("encoder.layers.0.self_attn") == "batch" and set(kinds.values()) == {
        "earlier"
    }
    before = snapshot(trainer)
    expected = manual_gate_gradient(trainer, samples[:2])
    trainer.begin_epoch(G_EPOCH)
    trainer.task.before_update(trainer, samples[:2])
    after = snapshot(trainer)
    model = trainer.get_model()
    for name, gradient in expected.items():
        torch.testing.assert_close(after[name], before[name] - gradient, rtol=1e-5, atol=1e-7)

    def drawn(ids):
        dataset = trainer.task.dataset("train")
        sample = dataset.collater([dataset[i] for i in ids])
        draw = ExpertDraw(sample["id"], 1, 1)
        model.train()
        with forward_context(draw=draw), collect_routings() as decisions:
            model(**sample["net_input"])
        place = sample["id"].tolist().index(3)
        return decisions[0][1].probs[place], decisions[0][1].expert_ids[place]

    for alone, among in zip(drawn([3]), drawn([3, 4, 5, 6])):
        torch.testing.assert_close(alone, among)


# 120 sentences of the toy corpus in batches of 8, two of which make an update: 8 updates an epoch
@pytest.mark.thorough(keep=("limits0", "limits1", "limits2", "limits3"))
@pytest.mark.parametrize(
    "limits, short",
    [
        (("--max-epoch", 4), "--max-epoch 4"),
        (("--max-epoch", 5), None),
        (("--max-epoch", 9, "--max-update", 32), "--max-update 32"),
        (("--max-update", 33), None),
        (("--max-update", 1, "--mae-gate", "uniform"), None),
        (("--max-update", 1, "--bcd", "none"), None),
        ((), None),
    ],
)
def test_a_run_that_ends_before_its_first_g_epoch_is_warned(
    build_trainer, caplog, limits, short
):
    flags = ("--bcd-g-every", 5, "--max-tokens", 1000, "--batch-size", 8, "--update-freq", 2)
    trainer, samples = build_trainer(*flags, *limits)
    caplog.clear()
    for _ in range(2):
        update(trainer, 1, samples[:2])
    warnings = [
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    ]
    warnings = [message for message in warnings if "--bcd-g-every" in message]
    assert len(warnings) == (short is not None)  # said once
    if short:
        assert f"{short} ends in epoch 4" in warnings[0] and "epoch 5" in warnings[0]


def test_uniform_gates_need_no_g_step(build_trainer):
    trainer, samples = build_trainer(
        "--mae-gate", "uniform", "--bcd-g-every", 1, "--mae-dropped-heads", 2
    )
    log = update(trainer, 1, samples[:1])
    assert log["gate_entropy"] == pytest.approx(math.log(28), abs=1e-3)
    assert "g_loss" not in log
    assert not any(is_gate(name) for name in trainer.get_model().state_dict())


def test_an_epochs_g_loss_is_a_mean_over_tokens(build_trainer):
    trainer, samples = build_trainer(*EVERY_SECOND)
    trainer.begin_epoch(G_EPOCH)
    with metrics.aggregate(new_root=True) as log:
        for micro_batches in (samples[:1], samples[1:4]):
            trainer.task.before_update(trainer, micro_batches)
    assert log["g_loss"].count == sum(sample["ntokens"] for sample in samples[:4])


def test_language_models_alternate_too(build_trainer, tmp_path, fairseq):
    """Adaptive inputs and softmax, whose criterion returns a vector of one; blocks of a running text."""
    (tmp_path / "train").write_text("".join(f"w{i % 7} w{i % 5} w{i % 3}\n" for i in range(60)))
    fairseq(
        "preprocess",
        "--only-source",
        "--trainpref",
        tmp_path / "train",
        "--destdir",
        tmp_path / "bin",
    )
    sizes = [f"--decoder-{name}-dim={32}" for name in ("embed", "ffn-embed", "input", "output")]
    sizes += [
        "--adaptive-input-cutoff=5,8",
        "--adaptive-softmax-cutoff=5,8",
        "--tokens-per-sample=20",
    ]
    sizes += ["--decoder-layers=1"]
    flags = (
        *EVERY_SECOND,
        "--criterion",
        "adaptive_loss",
        "--ddp-backend",
        "legacy_ddp",
        "--max-tokens",
        80,
    )
    of_model = dict(data=tmp_path / "bin", arch="mae_transformer_lm_wiki103", model=sizes)
    trainer, samples = build_trainer(*flags, **of_model, task="language_modeling_bcd")
    before = snapshot(trainer)
    assert update(trainer, F_EPOCH, samples[:2])["bcd_step"] == "F"
    middle = snapshot(trainer)
    assert all(is_statistic(name) == is_gate(name) for name in changed(before, middle))
    log = update(trainer, G_EPOCH, samples[:2])
    assert log["bcd_step"] == "GF" and log["g_loss"] > 0 and log["gate_gnorm"] > 0
    assert any(is_gate(n) and not is_statistic(n) for n in changed(middle, snapshot(trainer)))
    assert "gate_entropy.decoder.layers.0.self_attn" in log
    with pytest.raises(UserError, match="--gate-norm batch"):
        build_trainer(*flags, "--gate-norm", "batch", **of_model, task="language_modeling_bcd")


def test_activation_checkpointing_recomputes_the_same_experts(build_trainer):
    results = []
    for flags in ((), ("--checkpoint-activations",)):
        trainer, samples = build_trainer(*EVERY_SECOND, "--gate-dropout", 0, *flags)
        for epoch in (F_EPOCH, G_EPOCH):
            log = update(trainer, epoch, samples[:2])
        results.append((snapshot(trainer), log["gate_entropy"]))
    for name, tensor in results[0][0].items():
        torch.testing.assert_close(results[1][0][name], tensor, rtol=1e-4, atol=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-4)


def test_accumulation_equals_one_batch(build_trainer):
    """The same sentences as two micro-batches and as one: steps, draws and statistics are the same."""
    results = []
    for tokens, size in ((100, 4), (4000, 8)):
        flags = (
            *EVERY_SECOND,
            "--gate-dropout",
            0,
            "--max-tokens",
            tokens,
            "--batch-size",
            size,
        )
        trainer, samples = build_trainer(*flags, "--required-batch-size-multiple", 1)
        ids = sorted(i for sample in samples for i in sample["id"].tolist())[:8]
        dataset = trainer.task.dataset("train")
        parts = (ids[:4], ids[4:]) if size == 4 else (ids,)
        batches = [dataset.collater([dataset[i] for i in part]) for part in parts]
        for epoch in (G_EPOCH, F_EPOCH, G_EPOCH):
            update(trainer, epoch, batches)
        results.append(snapshot(trainer))
    for name, tensor in results[0].items():
        torch.testing.assert_close(
            results[1][name], tensor, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("precision", HALF)
def test_half_precision_takes_the_same_g_steps(build_trainer, precision):
    """The gates stay in float32 and their gradients are unscaled: close to the step in full precision."""
    moves = []
    for common in ({}, HALF[precision]):
        trainer, samples = build_trainer(*EVERY_SECOND, "--gate-dropout", 0, common=common)
        before = snapshot(trainer)
        log = update(trainer, G_EPOCH, samples[:2])
        after = snapshot(trainer)
        assert log["bcd_step"] == "GF" and log["g_skipped"] == 0
        moves.append(
            {
                n: after[n] - before[n]
                for n in before
                if n.endswith(("gate.fc1.weight", "gate.fc2.bias"))
            }
        )
    assert trainer.get_model().encoder.layers[0].fc1.weight.dtype in (
        torch.float16,
        torch.bfloat16,
    )
    for name, expected in moves[0].items():
        assert moves[1][name].dtype == torch.float32
        error = (moves[1][name] - expected).norm() / expected.norm()
        assert error < 0.1, f"{name}: {error}"


def test_an_overflow_lowers_the_scale_of_that_g_step_only(build_trainer, monkeypatch):
    scale = {
        **HALF["fp16"],
        "fp16_init_scale": 2**20,
    }  # activations' gradients overflow at first
    trainer, samples = build_trainer(*EVERY_SECOND, common=scale)
    trainer.begin_epoch(G_EPOCH)
    tried = []
    add = GateGradients.add
    monkeypatch.setattr(
        GateGradients, "add", lambda *args: (tried.append(args[-1]), add(*args))
    )
    with metrics.aggregate(new_root=True) as log:
        trainer.task.before_update(trainer, samples[:1])
    assert (
        log.get_smoothed_values()["g_skipped"] == 0
        and log.get_smoothed_values()["gate_gnorm"] > 0
    )
    assert tried == [2.0 ** (20 - i) for i in range(len(tried))] and len(tried) > 1
    assert trainer.optimizer.scaler.loss_scale == 2**20  # it is fairseq's to lower
    assert all(torch.isfinite(tensor).all() for tensor in snapshot(trainer).values())


@pytest.mark.parametrize(
    "flags, options, message",
    [
        (("--bcd-g-every", 0), {}, "--bcd-g-every 0"),
        (("--gate-clip-norm", "inf"), {}, "--gate-clip-norm .*inf"),
        (("--gate-lr", -0.1), {}, "--gate-lr .*-0.1"),
        (("--gate-lr", "nan"), {}, "--gate-lr .*nan"),
        ((), {"arch": "moa_transformer_tiny"}, "whose name begins with mae_"),
    ],
)
def test_impossible_flags_are_refused_by_name(build_trainer, flags, options, message):
    with pytest.raises(UserError, match=message):
        build_trainer(*flags, **options)
