"""--plan of the kinds of recipes; recorded speeds; its files against those of a run."""

import dataclasses
import json
from pathlib import Path

import numpy
import pytest
import torch
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.utils import move_to_cpu

from moa_fairseq.cli import main
from moa_fairseq.experiments.recipes import batch as batch_module
from moa_fairseq.experiments.recipes.batch import (
    TABLE,
    BatchPlan,
    CorpusSize,
    known_size,
    measured_size,
    planned_updates,
)
from moa_fairseq.experiments.recipes.hardware import Hardware, assumed_hardware, device_kind
from moa_fairseq.experiments.recipes.loading import load_recipe, shipped_recipes
from moa_fairseq.experiments.recipes.memory import disk, parameter_bytes
from moa_fairseq.experiments.recipes.planner import DEVICES, _matches, plan
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.running import run_recipe
from moa_fairseq.experiments.recipes.schema import Train
from moa_fairseq.experiments.recipes.speeds import (
    HOST_SECONDS,
    UTILISATION,
    RecordedSpeed,
    nearest_speed,
    read_speeds,
)
from moa_fairseq.experiments.recipes.workload import workload
from moa_fairseq.experiments.scoring.meta_model import build_meta_model
from moa_fairseq.process import flags

pytestmark = pytest.mark.usefixtures("forked_commands")

ROOT = Path(__file__).resolve().parents[3]
KINDS = (
    *("wmt14_ende_transformer_base", "wmt14_ende_moa_big", "iwslt14_deen_mae7"),
    *("wikitext103_mlm_transformer", "wikitext103_lm_base", "wikitext2_lm_switchhead_e1_tiny"),
    *("listops_switchhead_2h", "enwik8_lm_switchhead"),
)


@pytest.fixture
def plan_of(tmp_path, monkeypatch, capsys):
    """plan_of(experiment, ...) → the plan, without earlier runs, outside of torchrun and Slurm."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)

    def plan(name, *arguments):
        assert main(["recipe", name, *arguments, "--plan", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return plan


def test_text_of_unknown_size_has_the_symbols_that_the_recipe_asks_for(plan_of):
    sizes = [
        plan_of("text_lm_moh_small", f"--set=data.bpe={pieces}")["parameters"]
        for pieces in (8000, 65536)
    ]
    assert sizes[1] - sizes[0] == 2 * 768 * (65536 - 8000)  # two matrices
    assert round(sizes[1], -6) == 186e6


@pytest.mark.thorough(keep=("moa_big", "switchhead_2h"))
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_recipe_has_a_plan(name, plan_of, shipped):
    report = plan_of(name)
    recipe = shipped(name)
    assert report["parameters"] > 1e6
    assert [entry["count"] for entry in report["hardware"]] == [1, 8, 32] * 4 + [1] * 3
    for entry in report["hardware"]:
        # Without data its words are not known
        adaptive = recipe.train.criterion.startswith("adaptive")
        assert entry["memory"] > 16 * report["parameters"]
        assert entry["disk"]["checkpoint"] >= (8 if adaptive else 12) * report["parameters"]
        assert entry["disk"]["total"] >= 2 * entry["disk"]["checkpoint"]
        if recipe.train.effective_batch_tokens:
            assert (
                abs(entry["tokens_per_update"] / recipe.train.effective_batch_tokens - 1) < 0.01
            )
        if report["corpus"]:
            assert (recipe.train.max_update or entry["updates"]) >= entry["updates"] > 0
            low, high = entry["hours"]
            recorded = entry["speed_origin"].startswith("recorded")
            exact = recorded and "smaller batch" not in " ".join(entry["speed_assumptions"])
            assert (0 < low == high) if exact else (0 < low < high)


def test_the_text_says_what_is_rough(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["recipe", "wmt14_ende_moa_big", "--plan", "--device-name", "V100", "--gpus", "8"])
        == 0
    )
    text = capsys.readouterr().out
    assert (
        "199,974,912" in text and "8×V100" in text and "262,144" in text and "H100" not in text
    )
    assert (
        "rough: 4.4% to 19.3% of the peak" in text
        and " to " in text.partition("8×V100")[2].split("\n")[0]
    )


def test_a_note_of_a_plan_stands_once_and_a_device_on_one_line(tmp_path, monkeypatch, capsys):
    """Two devices are cut to fewer for the same reason; the last kinds have the longest names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("wmt14_ende_moa_big", "wikitext103_lm_base"):
        assert (
            main(f"recipe {name} --plan --set train.effective_batch_tokens=65536".split()) == 0
        )
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(set(lines)) and any(
            line.startswith("1×RTX5090 ") for line in lines
        )


@pytest.mark.parametrize("count, max_tokens, bound", [(8, 8192, "device"), (1, 256, "host")])
def test_hours_are_operations_by_shares_of_the_peak_or_the_hosts_time(
    plan_of, count, max_tokens, bound
):
    machine = ("--gpus", str(count), "--device-name", "A100")
    report = plan_of(
        "wmt14_ende_transformer_base", *machine, f"--set=train.max_tokens={max_tokens}"
    )
    (entry,) = report["hardware"]
    operations = entry["target_tokens"] * 6 * report["macs_per_target_token"]
    of_the_device = [operations / (312e12 * share * count) for share in reversed(UTILISATION)]
    of_the_host = [
        entry["updates"] * entry["batch"]["update_freq"] * 12 * each for each in HOST_SECONDS
    ]
    assert bound == "device" or (
        of_the_host[1] > of_the_device[1] and entry["batch"]["update_freq"] > 1
    )
    seconds = list(map(max, of_the_device, of_the_host))
    assert entry["hours"] == pytest.approx([each / 3600 for each in seconds], rel=0.05)


# recipe and overrides that make MoA's 100 epochs of WMT14 of it, hours by the measured speed, GB of the peak
EPOCHS = ("effective_batch_tokens=262144", "max_update=null", "max_epoch=100")
DENSE = ("wmt14_ende_transformer_base", *(f"train.{setting}" for setting in EPOCHS))
BIG = "transformer_vaswani_wmt_en_de_big"
MEASURED = {
    "moa_transformer_base": (("wmt14_ende_moa_base",), 33.8, 4.85),
    "moa_transformer_big": (("wmt14_ende_moa_big",), 45.7, 6.64),
    "transformer": (DENSE, 23.1, 4.87),
    BIG: ((*DENSE, f"model.arch={BIG}"), 25.4, 6.41),
}


@pytest.mark.parametrize("arch", MEASURED)
def test_hours_are_those_of_the_measured_speed(arch):
    """On the card and on its generation; elsewhere a range. And a batch has the measured peak."""
    (name, *settings), hours, peak = MEASURED[arch]
    recipe = load_recipe(shipped_recipes()[name], settings)
    machines = [assumed_hardware(card, 1) for card in ("H200", "H100", "A100", "RTX4090")]
    here, near, *others = plan(recipe, None, machines, ROOT / "results").as_dict()["hardware"]
    file = ROOT / "results/benchmarks/training-cuda.json"
    speed = json.loads(file.read_text(encoding="utf-8"))["rows"][arch]["tokens_per_second"]
    assert here["hours"] == near["hours"]
    passes = here["updates"] * here["batch"]["update_freq"]
    slowest = here["target_tokens"]
    # The recorded batch: a smaller one takes at most its time
    if here["batch"]["max_tokens"] < 8000:
        slowest = passes * 8000
    assert here["hours"][1] == pytest.approx(slowest / speed / 3600, rel=0.01)
    assert here["hours"][0] == pytest.approx(here["target_tokens"] / speed / 3600, rel=0.01)
    assert here["hours"][0] == pytest.approx(hours, rel=0.1)
    for entry in (here, near):
        assert "benchmarks/training-cuda.json on 1 H200" in entry["speed_origin"]
    for entry in others:
        assert entry["hours"][0] < entry["hours"][1] and entry["speed_origin"].startswith(
            "rough"
        )
    of_a_token = here["batch_memory"] / here["batch"]["max_tokens"]
    # Of 36,600 symbols, not of 32,768
    assert 8000 * of_a_token / 1e9 == pytest.approx(peak, rel=0.13)
    for entry, memory in ((here, 141e9), (others[-1], 24e9)):
        total = entry["memory"] + entry["most_tokens"] * of_a_token
        assert total == pytest.approx(0.9 * memory, rel=0.001) and entry["fits"]


def test_a_speed_is_of_one_size_and_precision():
    row = RecordedSpeed("x", 5.0, "H200", 1, "bf16", "a.json")
    assert (
        nearest_speed([row], "H200", "bf16", 8)
        == nearest_speed([row], "H100", "bf16", 8)
        == row
    )
    assert (
        nearest_speed([row], "H200", "fp32", 8) is None
        and nearest_speed([row], "A100", "bf16", 8) is None
    )
    older = dataclasses.replace(row, precision=None, count=8)
    assert nearest_speed([row, older], "H200", "bf16", 8) == older
    nearer = dataclasses.replace(row, device="H100")
    assert nearest_speed([row, nearer], "H100", "bf16", 1) == nearer
    recipe = load_recipe(shipped_recipes()["quickstart_moa"], ["model.num_experts=16"])
    work = workload(recipe, None)
    speed = dataclasses.replace(
        row,
        experiment=recipe.model.arch,
        parameters=work.cost.total_parameters,
        batch_tokens=8000,
    )
    assert not _matches(speed, recipe, work)  # the architecture has 8


def test_a_batch_that_does_not_fit():
    recipe = load_recipe(shipped_recipes()["quickstart_moa"], ["train.max_tokens=10000000"])
    recipe = dataclasses.replace(
        recipe, train=dataclasses.replace(recipe.train, effective_batch_tokens=None)
    )
    report = plan(recipe, None, [assumed_hardware("RTX4090", 1)], ROOT / "results")
    (entry,) = report.hardware
    assert entry.fits is False and 1024 < entry.most_tokens < 10_000_000
    most = entry.memory + entry.batch_memory * entry.most_tokens / 10_000_000
    assert most / DEVICES["RTX4090"].memory == pytest.approx(0.9, abs=1e-3)
    assert "!" in report.text()


def test_a_recorded_speed_comes_first(tmp_path):
    (tmp_path / "throughput").mkdir()
    values = {
        "experiment": "x",
        "hardware": "8 x NVIDIA A100-SXM4-80GB",
        "tokens_per_second": 5,
    }
    for name, text in (
        ("a", json.dumps(values)),
        ("b", "{"),
        ("c", "[]"),
        ("d", '{"hardware": 3}'),
    ):
        (tmp_path / "throughput" / f"{name}.json").write_text(text)
    (row,) = read_speeds(tmp_path)
    assert (row.device, row.count, row.file) == ("A100", 8, "throughput/a.json")
    assert {row.device for row in read_speeds(ROOT / "results")} >= {"CPU", "H200"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "unknown"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "unknown"),
        ("NVIDIA RTX A1000", "unknown"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 D", "unknown"),
        ("V100", "V100"),
    ],
)
def test_devices_are_known_by_their_whole_names(name, kind):
    assert device_kind(name) == kind


@pytest.mark.parametrize(
    ("flags", "precision", "devices", "size"),
    [
        ({}, "fp32", 1, 16),
        ({}, "amp", 1, 18),
        ({}, "fp16", 1, 20),
        ({}, "bf16", 8, 22),
        ({"memory-efficient-fp16": True}, "fp16", 1, 12),
        ({"zero-sharding": "os"}, "fp16", 8, 15),
        ({"ddp-backend": "fully_sharded"}, "fp16", 8, 3),
        ({"optimizer": "nag"}, "fp32", 1, 12),
    ],
)
def test_bytes_of_a_parameter(flags, precision, devices, size):
    assert parameter_bytes(flags, precision, devices) == size


def test_every_size_has_an_origin(shipped):
    table = json.loads(TABLE.read_text(encoding="utf-8"))["corpora"]
    assert all(
        entry["origin"] and 0 < entry["fill"] <= 1 and entry["experiments"] for entry in table
    )
    assert known_size(shipped("wmt14_enfr_moa_big")).vocabulary == 44512


def test_measured_updates_are_those_of_the_training(small, write_config, toy_data):
    config = TranslationConfig(data=str(toy_data), source_lang="en", target_lang="de")
    config.required_seq_len_multiple = 1
    config.dataset_impl = "mmap"
    task = TranslationTask.setup_task(config)
    task.load_dataset("train")
    small["train"].update(max_tokens=60, effective_batch_tokens=240)
    size = measured_size(load_recipe(write_config(small)), toy_data, 60)
    options = {
        "max_tokens": 60,
        "max_positions": (1024, 1024),
        "required_batch_size_multiple": 8,
    }
    iterator = task.get_batch_iterator(task.dataset("train"), num_shards=2, **options)
    assert size.updates_per_epoch(BatchPlan(2, 2, 60, 240)) == -(-len(iterator) // 2)
    assert (size.sentences, size.vocabulary) == (120, len(task.target_dictionary))


def test_table_2_has_its_own_vocabulary_and_text(plan_of):
    report = plan_of("wikitext103_mlm_transformer", "--gpus", "1", "--device-name", "V100")
    assert (
        report["corpus"]["vocabulary"] == 50265
        and 117e6 < report["corpus"]["target_tokens"] < 118e6
    )
    assert report["parameters"] == pytest.approx(51.34e6, rel=0.005)  # as the paper prints
    assert report["hardware"][0]["updates_per_epoch"] == 224


# --- files ------------------------------------------------------------

WORDS = 3000


@pytest.mark.thorough(keep="train0")
@pytest.mark.parametrize(
    ("train", "average"),
    [
        ({"keep-last-epochs": 2}, True),
        (
            {"keep-last-epochs": 9, "save-interval-updates": 2, "keep-interval-updates": 1},
            False,
        ),
        (
            {
                "keep-last-epochs": 9,
                "no-epoch-checkpoints": True,
                "optimizer": "nag",
                "lr": 0.01,
            },
            False,
        ),
        ({"keep-last-epochs": 9, "no-save-optimizer-state": True}, True),
    ],
)
def test_the_files_of_a_run_are_those_of_the_plan(
    train, average, small, write_config, toy_data, tmp_path
):
    small["data"]["recipe"] = "binarised"
    small["train"]["keep_last_epochs"] = train.pop("keep-last-epochs")
    small["train"]["flags"].update(train)
    small["model"]["flags"].update(
        {f"{side}-embed-dim": 128 for side in ("encoder", "decoder")}
    )
    small["model"]["flags"].update(
        {f"{side}-ffn-embed-dim": 512 for side in ("encoder", "decoder")}
    )
    small["average"] = {"epochs": 2} if average else None
    recipe = load_recipe(write_config(small))
    planned = plan(recipe, toy_data, [Hardware()], tmp_path).hardware[0].disk
    run = tmp_path / "run"
    for stage in ("train", "average") if average else ("train",):
        run_recipe(recipe, Hardware(), Options(data=toy_data, save_dir=run, stage=stage))
    files = list((run / "checkpoints").glob("*.pt"))
    assert len(files) == planned["files"]
    total = sum(path.stat().st_size for path in [*files, *run.glob("average.pt")])
    assert total == pytest.approx(planned["total"], rel=0.05)


def test_a_tied_weight_of_a_gpu_is_written_under_each_name(shipped):
    """fairseq copies each tensor to the CPU, half precision to fp32, before it writes the file."""
    recipe = shipped("quickstart_transformer")
    line = flags({**recipe.model.as_flags(), "arch": None})
    model = build_meta_model(recipe.model.arch, WORDS, "shared", line, weights=True)
    storages = [
        value.untyped_storage() for value in move_to_cpu(model.bfloat16().state_dict()).values()
    ]
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    planned = disk(recipe, model.float(), True, None, None)
    state = sum(parameter.numel() for parameter in model.parameters()) * 8
    assert planned["checkpoint"] - state == size
    assert disk(recipe, model, False, None, None)["checkpoint"] < planned["checkpoint"]


@pytest.mark.parametrize(
    "batches, devices, steps, updates",
    [(9, 2, 2, 3), (8, 2, 2, 2), (1, 8, 4, 1), (7, 3, 1, 3), (10, 1, 4, 3)],
)
def test_a_last_round_that_is_not_full_is_an_update(batches, devices, steps, updates):
    size = CorpusSize("x", 9, 9, 9, 9, 1.0, "here", batches=batches)
    assert size.updates_per_epoch(BatchPlan(devices, steps, 60, 240)) == updates


@pytest.mark.parametrize(
    ("epochs", "most", "known", "updates"),
    [
        (3, None, True, 15),
        (3, 14, True, 14),
        (3, 15, True, 15),
        (3, 16, True, 15),
        (None, 16, True, 16),
        (3, 14, False, 14),
        (3, None, False, None),
    ],
)
def test_a_training_ends_at_the_first_of_its_limits(epochs, most, known, updates):
    size = CorpusSize("x", 9, 9, 9, 9, 1.0, "here", batches=9) if known else None
    train = Train(60, "cross_entropy", max_epoch=epochs, max_update=most)
    assert planned_updates(train, BatchPlan(2, 1, 60, None), size) == updates


@pytest.mark.parametrize(
    ("most_sentences", "most_tokens", "batches"),
    [(None, 9, 3), (2, 9, 4), (2, 99, 3), (1, 99, 5)],
)
def test_batches_are_cut_at_the_first_of_both_limits(
    shipped, tmp_path, monkeypatch, most_sentences, most_tokens, batches
):
    """Of sentences and of tokens, as fairseq does."""
    sizes = numpy.array([3, 3, 3, 9, 9])
    monkeypatch.setattr(batch_module, "sentence_sizes", lambda *_: (sizes, sizes))
    (tmp_path / "dict.de.txt").write_text("a 1\n")
    recipe = shipped("quickstart_moa")
    flags_of_training = recipe.train.flags | {"batch-size": most_sentences}
    train = dataclasses.replace(recipe.train, flags=flags_of_training)
    recipe = dataclasses.replace(recipe, train=train)
    assert measured_size(recipe, tmp_path, most_tokens).batches == batches


def test_an_epoch_has_an_update_at_least():
    size = CorpusSize("x", 9, 9, 9, 9, 1.0, "here")
    assert size.updates_per_epoch(BatchPlan(2, 2, 60, 240)) == 1


def test_the_vocabulary_of_a_masked_language_model_has_its_mask(shipped, toy_wiki_data):
    lines = len((toy_wiki_data / "dict.txt").read_text().splitlines())
    assert (
        measured_size(shipped("quickstart_mlm"), toy_wiki_data, 512).vocabulary == lines + 4 + 1
    )
    causal = shipped("wikitext2_lm_moa_tiny", "data.recipe=binarised")
    assert measured_size(causal, toy_wiki_data, 512).vocabulary == lines + 4


def test_hours_follow_a_recorded_speed_by_the_number_of_devices(shipped, tmp_path):
    """Recorded on 2 GPUs, 1,000 tokens a second: 8 of them have four times as many, and 1 has half."""
    recipe = shipped("wmt14_ende_transformer_base")
    (tmp_path / "throughput").mkdir()
    record = {"experiment": recipe.experiment, "hardware": "2 x NVIDIA A100-SXM4-80GB"}
    (tmp_path / "throughput" / "a.json").write_text(
        json.dumps({**record, "tokens_per_second": 1000})
    )
    machines = [assumed_hardware("A100", count) for count in (1, 2, 8)]
    entries = plan(recipe, None, machines, tmp_path).hardware
    for entry, speed in zip(entries, (500, 1000, 4000)):
        assert entry.hours == pytest.approx([entry.target_tokens / speed / 3600] * 2, rel=0.05)
        assert "throughput/a.json" in entry.speed_origin


def test_the_best_checkpoints_that_are_kept_count_too(small, write_config):
    """fairseq keeps `checkpoint_last.pt`, the best, and --keep-best-checkpoints more beside them."""
    recipe = load_recipe(write_config(small))
    model = torch.nn.Linear(2, 2)
    files = disk(recipe, model, False, 30, 3)["files"]
    small["train"]["flags"]["keep-best-checkpoints"] = 4
    assert disk(load_recipe(write_config(small)), model, False, 30, 3)["files"] == files + 4
    small["train"]["flags"] = {**small["train"]["flags"], "disable-validation": True}
    del small["train"]["flags"]["keep-best-checkpoints"]
    assert disk(load_recipe(write_config(small)), model, False, 30, 3)["files"] == files - 1


@pytest.mark.parametrize(("keep", "files"), [(None, 3), (-1, 3), (0, 3), (2, 2), (5, 3)])
def test_checkpoints_by_updates_stay_unless_their_number_is_limited(
    small, write_config, keep, files
):
    model = torch.nn.Linear(2, 2)
    before = disk(load_recipe(write_config(small)), model, False, 30, 3)["files"]
    small["train"]["flags"]["save-interval-updates"] = 10  # 3 in 30 updates
    if keep is not None:
        small["train"]["flags"]["keep-interval-updates"] = keep
    after = disk(load_recipe(write_config(small)), model, False, 30, 3)["files"]
    assert after == before + files


def test_averaged_weights_are_a_second_copy_in_each_checkpoint(small, write_config):
    weights = 6 * 4  # bytes of the model, beside 8 of Adam for each of its 6 numbers
    for ema, copies in ((False, 1), (True, 2)):
        small["train"]["flags"]["store-ema"] = ema
        planned = disk(load_recipe(write_config(small)), torch.nn.Linear(2, 2), False, 30, 3)
        assert planned["checkpoint"] == copies * weights + 6 * 8
