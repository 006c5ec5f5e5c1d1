"""One update of a trainer of MAE, what it changed, and the gradient that its gates should have followed."""

import copy

import torch
from fairseq.logging import metrics

from moa_fairseq.layers.sequence_gate import gates_of

F_EPOCH = 1
G_EPOCH = 2
EVERY_SECOND = ("--bcd-g-every", 2)
# Settings of fairseq's common section for half precision on a CPU.
HALF = {
    "fp16": {"fp16": True, "fp16_no_flatten_grads": True, "fp16_init_scale": 2**7},
    "bf16": {"bf16": True, "tpu": False},
}


def is_gate(name):
    return ".gate." in name


def is_statistic(name):
    return is_gate(name) and ("running" in name or name.endswith("num_batches_tracked"))


def snapshot(trainer):
    return {name: tensor.clone() for name, tensor in trainer.get_model().state_dict().items()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def update(trainer, epoch, samples):
    trainer.begin_epoch(epoch)
    with metrics.aggregate(new_root=True) as log:
        trainer.train_step(samples)
    return log.get_smoothed_values()


def manual_gate_gradient(trainer, samples):
    """∂(mean loss over all tokens of all micro-batches)/∂gates, by backward through everything."""
    model = trainer.get_model()
    criterion = trainer.get_criterion()
    twin = copy.deepcopy(model).train()
    for gate in gates_of(twin):
        gate.requires_grad_(True)
        gate.dropout = 0.0
    total = 0.0
    tokens = 0
    for sample in samples:
        loss, sample_size, _ = criterion(twin, sample)
        total = total + loss
        tokens = tokens + sample_size
    (total / tokens).backward()
    return {name: p.grad for name, p in twin.named_parameters() if is_gate(name)}


def statistics(trainer):
    return {name: tensor for name, tensor in snapshot(trainer).items() if is_statistic(name)}
