"""The planned memory against the peak of an update; the planned checkpoints against those of a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import criterions
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.evaluation.complexity import count
from moa_fairseq.evaluation.skeleton import build_skeleton, parse_training_flags
from moa_fairseq.recipes.command import Options, run_recipe
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.planner import Workload, disk, kept_per_token, logits_per_token, plan
from moa_fairseq.running.command_line import flags

ROOT = Path(__file__).resolve().parents[2]
TRANSLATION_LAYERS = ["model.flags.encoder-layers=3", "model.flags.decoder-layers=4"]
DECODER_LAYERS = ["model.flags.decoder-layers=4"]
ENCODER_LAYERS = ["model.flags.encoder-layers=4"]
BANDS = ["model.flags.adaptive-softmax-cutoff='500,1500'", "model.flags.adaptive-input-cutoff='500,1500'"]
WORDS = 3000


@pytest.fixture
def words(tmp_path):
    """A folder with a dictionary of WORDS symbols, the n-th of which stands 10^5 / n times in the text."""
    lines = [f"w{rank} {100_000 // rank}\n" for rank in range(1, WORDS - 3)]
    (tmp_path / "dict.txt").write_text("".join(lines))
    return tmp_path


def recipe_of(name, overrides=()):
    return load_recipe(ROOT / "configs" / f"{name}.yaml", overrides)


def work_of(recipe, length=25):
    line = flags({**recipe.model.as_flags(), "arch": None})
    model = build_skeleton(recipe.model.arch, WORDS, "separate", line)
    return Workload(model, count(model, length, length), WORDS, [length, length], None)


def update(recipe, dictionary, sentences, length):
    """A function that carries out forward and backward pass of one batch, as fairseq-train would."""
    values = {**recipe.model.as_flags(), **recipe.train.flags}
    values.update(criterion=recipe.train.criterion, task=recipe.train.task)
    args = parse_training_flags(["no-data", *flags(values)], "refused")
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, args=args)
    task.dictionary = dictionary
    model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, task).train()
    criterion = criterions.build_criterion(convert_namespace_to_omegaconf(args).criterion, task)
    frequencies = torch.tensor(dictionary.count, dtype=torch.float32)
    frequencies[:4] = 0
    shape = (sentences, length)
    source, target = (torch.multinomial(frequencies, sentences * length, True).view(shape) for _ in range(2))
    net_input = {"src_tokens": source, "src_lengths": torch.full((sentences,), length)}
    if recipe.kind == "translation":
        net_input["prev_output_tokens"] = target
    if recipe.kind == "masked_lm":
        target = target.masked_fill(torch.rand(shape) > 0.15, dictionary.pad())
    batch = {"net_input": net_input, "target": target, "ntokens": target.numel(), "nsentences": sentences}
    if recipe.train.flags.get("carried-chunks"):
        model.decoder.carry_context(1)
        net_input["chunk"] = -1

    def step():
        if "chunk" in net_input:
            net_input["chunk"] += 1
        criterion(model, batch)[0].backward()

    step()  # from here on the gradients are there
    return step


def peak(step):
    """The most bytes of tensors that `step` holds at once, beyond those that were there before."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("experiment", "overrides", "sentences", "length"),
    [
        ("wmt14_ende_moa_base", TRANSLATION_LAYERS, 40, 25),
        ("iwslt14_deen_moh_50", TRANSLATION_LAYERS, 40, 25),
        ("wikitext103_mlm_moa_8k16e256d", ENCODER_LAYERS, 8, 128),
        ("wikitext103_lm_base", [*DECODER_LAYERS, *BANDS], 2, 512),
        ("wikitext103_lm_moa_47m", DECODER_LAYERS, 2, 512),
        ("wikitext103_lm_switchhead_47m", DECODER_LAYERS, 2, 512),
    ],
)
def test_the_peak_of_an_update_is_within_15_percent(experiment, overrides, sentences, length, words):
    recipe = recipe_of(experiment, overrides)
    work = work_of(recipe, length)
    a_token = kept_per_token(recipe, work, "fp32", on_gpu=False) + 12 * logits_per_token(recipe, work, words)
    measured = peak(update(recipe, Dictionary.load(str(words / "dict.txt")), sentences, length))
    assert a_token * sentences * length == pytest.approx(measured, rel=0.15)


def test_an_adaptive_softmax_without_frequencies_has_no_figure(tmp_path):
    recipe = recipe_of("wikitext103_lm_base", BANDS)
    assert logits_per_token(recipe, work_of(recipe), None) is None
    (entry,) = plan(recipe, None, [Hardware(1, "A100", (8, 0), ("0",))], tmp_path)["hardware"]
    assert entry["memory"] is None and entry["fits"] is None and entry["disk"]["checkpoint"] > 0


def kept_by(experiment, *overrides, precision="bf16", on_gpu=True):
    recipe = recipe_of(experiment, overrides)
    return kept_per_token(recipe, work_of(recipe), precision, on_gpu)


def test_what_else_changes_the_activations():
    moa = kept_by("wmt14_ende_moa_base")
    assert kept_by("wmt14_ende_moa_base", "model.flags.checkpoint-activations=true") < moa / 4
    assert kept_by("wmt14_ende_moa_base", "model.flags.activation-dropout=0") < moa
    assert kept_by("wmt14_ende_moa_base", "model.flags.encoder-layers=12") > 1.3 * moa
    assert kept_by("wmt14_ende_moa_base", precision="fp32") > 1.4 * moa
    assert kept_by("wmt14_ende_moa_base", on_gpu=False) > moa  # a GPU keeps no attention weights


@pytest.mark.parametrize(
    ("train", "average"),
    [
        ({"keep-last-epochs": 2}, True),
        ({"keep-last-epochs": 9, "save-interval-updates": 2, "keep-interval-updates": 1}, False),
        ({"keep-last-epochs": 9, "no-epoch-checkpoints": True, "optimizer": "nag", "lr": 0.01}, False),
        ({"keep-last-epochs": 9, "no-save-optimizer-state": True}, True),
    ],
)
def test_the_files_of_a_run_are_those_of_the_plan(train, average, small, write_config, toy_data, tmp_path):
    small["data"]["recipe"] = "binarised"
    small["train"]["keep_last_epochs"] = train.pop("keep-last-epochs")
    small["train"]["flags"].update(train)
    small["model"]["flags"].update({f"{side}-embed-dim": 128 for side in ("encoder", "decoder")})
    small["model"]["flags"].update({f"{side}-ffn-embed-dim": 512 for side in ("encoder", "decoder")})
    small["average"] = {"epochs": 2} if average else None
    recipe = load_recipe(write_config(small))
    planned = plan(recipe, toy_data, [Hardware()], tmp_path)["hardware"][0]["disk"]
    run = tmp_path / "run"
    for stage in ("train", "average") if average else ("train",):
        run_recipe(recipe, Hardware(), Options(data=toy_data, save_dir=run, stage=stage))
    files = list((run / "checkpoints").glob("*.pt"))
    assert len(files) == planned["files"]
    total = sum(path.stat().st_size for path in [*files, *run.glob("average.pt")])
    assert total == pytest.approx(planned["total"], rel=0.05)


def test_a_tied_weight_of_a_gpu_is_written_under_each_name():
    """fairseq copies each tensor to the CPU, half precision to fp32, before it writes the file."""
    from fairseq.utils import move_to_cpu

    recipe = recipe_of("quickstart_transformer")
    model = build_skeleton(
        recipe.model.arch, WORDS, "shared", flags({**recipe.model.as_flags(), "arch": None}), weights=True
    )
    written = move_to_cpu(model.bfloat16().state_dict())
    size = sum(
        {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in written.values()}.values()
    )
    planned = disk(recipe, model.float(), True, None, None)
    state = sum(parameter.numel() for parameter in model.parameters()) * 8
    assert planned["checkpoint"] - state == size
    assert disk(recipe, model, False, None, None)["checkpoint"] < planned["checkpoint"]
