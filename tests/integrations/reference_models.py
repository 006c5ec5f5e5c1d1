"""Run by fairseq's environment: exported models, and what fairseq computes with them, in one folder each.

.venv/bin/python tests/integrations/reference_models.py FOLDER
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "plugin" / "models"))
import whole_models
from fairseq.sequence_generator import SequenceGenerator
from safetensors.torch import save_file

from moa_fairseq.experiments.inference.transformers_folder import write_model
from moa_fairseq.plugin.criterions import with_routing

SMALL = ("--encoder-layers", 2, "--decoder-layers", 2)
LOSS = {
    "label_smoothing": 0.1,
    "balance_loss": "moa",
    "load_balance_coef": 0.3,
    "z_loss_coef": 0.2,
}
LOSS |= {"aux_loss_reduce": "sum", "aux_loss_scale": "sample-size"}
CASES = {
    "moa": ("moa_transformer_tiny", *SMALL, "--share-all-embeddings"),
    "mae": ("mae_transformer_tiny", *SMALL),
    "moh": ("moh_transformer_tiny", *SMALL, "--share-decoder-input-output-embed"),
    "switchhead": (
        *("switchhead_transformer_tiny", *SMALL),
        *("--encoder-normalize-before", "--decoder-normalize-before"),
    ),
    "gqe": ("gqe_transformer_tiny", *SMALL, "--positions", "rope"),
    "namoh": ("namoh_transformer_tiny", *SMALL, "--positions", "learned"),
    "dense": (
        "dense_transformer_tiny",
        *SMALL,
        "--initialization",
        "admin",
        "--head-gate",
        "head",
    ),
    "fairseq": ("transformer", *SMALL, "--encoder-embed-dim", 64, "--decoder-embed-dim", 64),
    "latent-lm": ("latent_transformer_lm_base", "--decoder-layers", 2),
    "moa-lm": ("moa_lm_tiny",),
    "mae-lm": ("mae_transformer_lm_base", "--decoder-layers", 2),
    "switchall-lm": (
        *("switchall_lm_tiny", "--output-dropout", 0, "--activation-dropout", 0),
        *("--sigma-moe-expert-dropout", 0, "--expert-dropout", 0),
    ),
    "adaptive-lm": (
        *(
            "dense_transformer_lm_base",
            "--decoder-layers",
            2,
            "--adaptive-softmax-cutoff",
            "9,20",
        ),
        *("--adaptive-input", "--adaptive-input-cutoff", "9,20", "--tie-adaptive-weights"),
    ),
    "moa-mlm": ("moa_roberta_tiny",),
    "moh-mlm": ("moh_roberta_tiny",),
}
STEPS = 10


def criterion_of(batch, adaptive):
    """The criterion of the three jobs: label smoothing 0.1 or, of language models, none."""
    name = "LabelSmoothedCrossEntropy" if "prev_output_tokens" in batch else "CrossEntropy"
    name = "AdaptiveLoss" if adaptive else name
    words = {"sentence_avg": False}
    if name.startswith("Label"):
        words["label_smoothing"] = LOSS["label_smoothing"]
    routing = {key: value for key, value in LOSS.items() if key != "label_smoothing"}
    cfg = getattr(with_routing, f"{name}WithRoutingConfig")(**words, **routing)
    task = SimpleNamespace(target_dictionary=whole_models.dictionary())
    return getattr(with_routing, f"{name}WithRouting").build_criterion(cfg, task)


def write(folder, arch, *flags):
    model = whole_models.build(arch, *flags, "--dropout", 0, "--attention-dropout", 0)
    for name, parameter in model.named_parameters():
        # Gates and biases that start at zero show nothing
        if name.endswith("bias") or not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    inputs = whole_models.batch(arch)
    translates = "prev_output_tokens" in inputs
    if translates:
        inputs["prev_output_tokens"][:, 0] = 2  # the end, from which a decoder starts
    generation = {"beam": 4, "lenpen": 1.0, "max_len_b": 12, "min_len": 1}
    loss = SimpleNamespace(**{**LOSS, "label_smoothing": LOSS["label_smoothing"] * translates})
    write_model(folder, model, whole_models.dictionary(), loss, generation)
    adaptive = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
    kept = dict(inputs)
    with torch.no_grad():
        kept["logits"] = model(**inputs)[0]
        if adaptive is not None:
            kept["logits"] = adaptive.get_log_prob(kept["logits"], None)
    if translates:
        generator = SequenceGenerator(
            [model], whole_models.dictionary(), beam_size=4, max_len_b=12
        )
        source = {"net_input": {name: inputs[name] for name in ("src_tokens", "src_lengths")}}
        best = [found[0] for found in generator.generate([model], source)]
        kept["best"] = torch.nn.utils.rnn.pad_sequence(
            [found["tokens"] for found in best], True, 1
        )
        kept["score"] = torch.stack([found["score"] for found in best])
    read = inputs["prev_output_tokens" if translates else "src_tokens"]
    # what follows each token: the next one, and the end after the last
    target = torch.cat([read[:, 1:], torch.full_like(read[:, :1], whole_models.PAD)], 1)
    target[read.ne(whole_models.PAD) & target.eq(whole_models.PAD)] = 2
    sample = {
        "net_input": inputs,
        "target": target,
        "ntokens": int(target.ne(whole_models.PAD).sum()),
    }
    kept["target"] = target
    criterion = criterion_of(inputs, adaptive is not None)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        total, size, _ = criterion(model, sample)
        losses.append((total / size).detach().sum())  # adaptive_loss has a vector of one
        optimizer.zero_grad()
        (total / size).backward()
        optimizer.step()
    kept["losses"] = torch.stack(losses)
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in kept.items()},
        folder / "reference",
    )


if __name__ == "__main__":
    for case, words in CASES.items():
        place = Path(sys.argv[1]) / case
        place.mkdir(parents=True)
        write(place, *words)
