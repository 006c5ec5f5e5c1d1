"""Induction heads: scores by the definition, near chance before training, and high after it."""

import json
import random

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from matplotlib.image import imread
from shared_fixtures import USER_DIR

from moa_fairseq.cli import main
from moa_fairseq.experiments.analysis.head_scores import HeadMap, HeadScore, measure_heads
from moa_fairseq.experiments.analysis.induction_heads import draw_scores

SIZES = """--decoder-layers 2 --decoder-embed-dim 64 --decoder-input-dim 64 --decoder-output-dim 64
    --decoder-ffn-embed-dim 128 --tokens-per-sample 64 --positions rope --dropout 0"""
TWICE = torch.stack(
    [torch.tensor([2, *row, *row]) for row in ([9, 4, 12, 7, 22], [30, 8, 5, 11, 6])]
)
# the queries of the second time, and what is to be copied
AT = range(6, 10)
AFTER = range(2, 6)


def build(data, arch, *flags):
    torch.manual_seed(5)
    words = [
        data,
        "--task",
        "language_modeling",
        "--arch",
        arch,
        "--cpu",
        *SIZES.split(),
        *flags,
    ]
    args = options.parse_args_and_arch(
        options.get_training_parser(), [str(word) for word in words]
    )
    cfg = convert_namespace_to_omegaconf(args)
    return tasks.setup_task(cfg.task).build_model(cfg.model).double().eval()


def copied(model, effects, batch):
    """The share of the symbol to copy in what effects [B, T, C] raise, mean over the places of `batch`."""
    effects = (effects - effects.mean(-1, keepdim=True)) * model.decoder.layer_norm.weight
    logits = effects @ model.decoder.output_projection.weight.t()
    raised = (logits - logits.mean(-1, keepdim=True)).clamp(min=0)
    shares = [
        raised[row, at, TWICE[row, after]] / raised[row, at][TWICE[row, 1:6]].sum()
        for row, at, after in batch
    ]
    return torch.stack(shares).mean().item()


def inputs_of(model, layer):
    """What the attention of a layer is called with."""
    seen = []
    module = model.decoder.layers[layer].self_attn
    hook = module.register_forward_pre_hook(
        lambda module, args, call: seen.append(call), with_kwargs=True
    )
    model(TWICE)
    hook.remove()
    call = {**seen[0], "need_weights": True, "need_head_weights": True}
    # [B, T, C], [B, H, T, S]
    return (
        module,
        call["query"].transpose(0, 1),
        module(**call)[1].transpose(0, 1),
    )


PLACES = [(row, at, after) for row in range(2) for at, after in zip(AT, AFTER)]


@torch.no_grad()
def test_switchheads_scores_are_those_of_its_equations(text_data):
    model = build(text_data, "switchhead_lm_tiny")
    heads, _ = measure_heads(model, TWICE, torch.device("cpu"))
    module, x, weights = inputs_of(model, 1)

    def gates(router):
        scores = torch.sigmoid(x @ router.projection.weight.t()).unflatten(-1, (2, 5))
        return torch.zeros_like(scores).scatter(
            -1, (top := scores.topk(2, -1)).indices, top.values
        )

    source = gates(module.source_router)
    destination = gates(module.router)
    into, out = (
        part.weight.unflatten(0, (2, 5)) for part in (module.v_proj, module.out_proj)
    )  # [H, E, D, C]
    for number, head in enumerate(heads[2:]):
        attention = weights[:, number]
        assert head.label == f"head {number + 1}" and head.name == "decoder.layers.1.self_attn"
        expected = [attention[row, at, after] for row, at, after in PLACES]
        assert head.prefix == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
        parts = []
        for expert in range(5):
            values = source[..., number, expert, None] * (x @ into[number, expert].t())
            parts.append(
                torch.einsum(
                    "bte,btd,edc->btc",
                    destination[:, :, number],
                    attention @ values,
                    out[number],
                )
            )
            wrote = [
                place for place in PLACES if source[place[0], place[2], number, expert] > 0
            ]
            part = head.experts[expert]
            assert part.chosen == pytest.approx(len(wrote) / len(PLACES))
            if wrote:
                expected = [attention[row, at, after] for row, at, after in wrote]
                assert part.prefix == pytest.approx(
                    torch.stack(expected).mean().item(), rel=1e-5
                )
                assert part.copying == pytest.approx(copied(model, parts[-1], wrote), rel=1e-5)
        assert head.copying == pytest.approx(copied(model, sum(parts), PLACES), rel=1e-5)


@torch.no_grad()
def test_moas_scores_are_those_of_each_expert_where_it_was_chosen(text_data):
    model = build(text_data, "moa_lm_tiny")
    heads, _ = measure_heads(model, TWICE, torch.device("cpu"))
    module, x, weights = inputs_of(model, 0)
    routing = module.router(x.flatten(0, 1))
    experts, gates = (each.view(2, -1, 4) for each in (routing.expert_ids, routing.gates))
    values = x @ module.v_proj.weight.t()
    assert [head.label for head in heads[:10]] == [
        f"expert {number + 1}" for number in range(10)
    ]
    for expert, head in enumerate(heads[:10]):
        chosen = [place for place in PLACES if expert in experts[place[0], place[1]]]
        assert head.chosen == pytest.approx(len(chosen) / len(PLACES))
        effects = torch.zeros_like(x)
        for row, at, _ in chosen:
            slot = experts[row, at].tolist().index(expert)
            effects[row, at] = (
                gates[row, at, slot]
                * (weights[row, slot, at] @ values[row])
                @ module.out_experts.weight[expert]
            )
        if chosen:
            slots = [experts[row, at].tolist().index(expert) for row, at, _ in chosen]
            expected = [
                weights[row, slot, at, after] for slot, (row, at, after) in zip(slots, chosen)
            ]
            assert head.prefix == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)
            assert head.copying == pytest.approx(copied(model, effects, chosen), rel=1e-5)


FOUR_HEADS = ("--decoder-attention-heads", 4)


@pytest.mark.parametrize(
    "arch, flags",
    [
        ("transformer_xl_lm_tiny", ("--switchhead-heads", 4, "--expert-dim", 16)),
        (
            "moh_transformer_lm_small",
            (*FOUR_HEADS, "--moh-shared-heads", 1, "--experts-per-token", 2),
        ),
        ("mae_transformer_lm_base", FOUR_HEADS),
        ("gqe_lm_base", FOUR_HEADS),
        ("namoh_lm_base", FOUR_HEADS),
    ],
)
def test_heads_of_other_families_are_near_chance_before_training(text_data, arch, flags):
    heads, predicted = measure_heads(build(text_data, arch, *flags), TWICE, torch.device("cpu"))
    assert max(head.prefix for head in heads) < 0.4 and predicted < 0.5
    if arch in (
        "gqe_lm_base",
        "namoh_lm_base",
    ):  # their heads' results do not stand side by side
        assert all(head.copying is None for head in heads)
    else:
        assert all(0 <= head.copying < 0.7 for head in heads)
    assert len({head.name for head in heads}) == 2


def test_what_cannot_be_read_is_named(text_data, save_model, tmp_path, capsys):
    task = {"task": "language_modeling", "arch": "mae_transformer_lm_base"}
    path = save_model(text_data, tmp_path / "lm.pt", **task)
    command = (
        f"analyze induction-heads {path} --data {text_data} --cpu --output {tmp_path}/a.png"
    )
    for flags in ("--length 40", "--length 5 --sequences 0", "--subset x"):
        with pytest.raises(SystemExit):
            raise SystemExit(main(f"{command} {flags}".split()))
        assert flags.removeprefix("--length 5 ") in capsys.readouterr().err


def test_the_longest_sequences_fill_the_block_and_the_seed_draws_them(
    text_data, save_model, tmp_path
):
    model = {"task": "language_modeling", "arch": "mae_transformer_lm_base"}
    path = save_model(text_data, tmp_path / "lm.pt", "--tokens-per-sample", 21, **model)
    found = []
    for seed in (1, 2):
        command = f"analyze induction-heads {path} --data {text_data} --cpu --length 10"
        command += f" --sequences 2 --seed {seed} --output {tmp_path}/a.png"
        assert main(f"{command} --json {tmp_path}/a.json".split()) == 0
        found.append(json.loads((tmp_path / "a.json").read_text()))
    assert found[0]["heads"] != found[1]["heads"]
    # By the symbols of the second time, but for the last
    seen = [place + 1 for place in range(11, 20)]
    assert found[0]["even_attention"] == pytest.approx(sum(1 / number for number in seen) / 9)


def test_layers_of_the_picture_are_in_order():
    heads = []
    for layer in range(12):
        name = f"decoder.layers.{layer}.self_attn"
        attention = HeadMap(torch.eye(3), {})
        heads.append(HeadScore(name, "head", 1, layer / 20, None, 1.0, map=attention))
    panel = draw_scores(heads[::-1], ["</s>", "a", "a"]).subfigs[0].axes[0]
    assert panel.images[0].get_array()[:, 0].tolist() == pytest.approx(
        [layer / 20 for layer in range(12)]
    )


def repeated(folder, preprocess):
    """Random symbols twice in a row, 8 to 25 of 40, one sequence a line."""
    generator = random.Random(1)
    words = [f"w{number}" for number in range(40)]
    for split, count in (("train", 20000), ("valid", 200)):
        rows = [generator.sample(words, generator.randint(8, 25)) for _ in range(count)]
        (folder / f"{split}.txt").write_text(
            "".join(" ".join([*row, *row]) + "\n" for row in rows)
        )
    texts = {f"{split}pref": str(folder / f"{split}.txt") for split in ("train", "valid")}
    preprocess({"only-source": True, "destdir": str(folder / "bin"), **texts})
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.thorough(one_in=2)
@pytest.mark.parametrize("arch", ["switchhead_lm_tiny", "transformer_xl_lm_tiny"])
def test_a_model_trained_on_repeated_text_has_heads_that_match_and_copy(
    fairseq, preprocess, tmp_path, arch
):
    data = repeated(tmp_path, preprocess)
    line = f"{data} --user-dir {USER_DIR} --cpu --task language_modeling --arch {arch} {SIZES}"
    line += " --sample-break-mode eos --activation-dropout 0 --attention-dropout 0 --seed 1"
    line += " --optimizer adam --lr 0.004 --lr-scheduler inverse_sqrt --warmup-updates 100"
    line += " --clip-norm 1 --max-tokens 2048 --criterion cross_entropy --num-workers 0"
    found = {}
    for updates in (1, 600):
        save = tmp_path / f"{updates}"
        more = f"--max-update {updates} --save-dir {save} --no-epoch-checkpoints"
        fairseq("train", *f"{line} {more}".split(), timeout=900)
        command = f"analyze induction-heads {save} --data {data} --cpu --length 20"
        command += f" --output {save}/heads.png --json {save}/heads.json"
        assert main(command.split()) == 0
        assert imread(save / "heads.png").std() > 0.01
        found[updates] = json.loads((save / "heads.json").read_text())
    assert max(head["prefix"] for head in found[1]["heads"]) < 3 * found[1]["even_attention"]
    assert found[1]["predicted"] < 0.2 and found[600]["predicted"] > 0.8
    best = found[600]["heads"][0]
    assert best["name"] == "decoder.layers.1.self_attn" and best["prefix"] > 0.5
    assert best["copying"] > 3 * found[600]["even_copying"]
