"""Every shipped YAML file: valid, accepted by fairseq's own parser, with its header; the papers' scripts."""

import fnmatch
import functools
import itertools
import json
import operator
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.recipes.batch import plan_batch
from moa_fairseq.experiments.recipes.flags import check_flags
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.loading import (
    find_recipe,
    load_recipe,
    row_overrides,
    shipped_recipes,
)
from moa_fairseq.experiments.recipes.run import Options
from moa_fairseq.experiments.recipes.schema import (
    CAUSAL_LM,
    CLASSIFICATION,
    MASKED_LM,
    TRANSLATION,
)
from moa_fairseq.experiments.scoring.complexity import complexity
from moa_fairseq.experiments.scoring.zero_shot import RESULT_TASKS

ROOT = Path(__file__).resolve().parents[3]
RECIPES = shipped_recipes()
CONFIGS = list(RECIPES.values())
NAMES = [path.stem for path in CONFIGS]
SCRIPTS = [name for name in NAMES if (ROOT / "scripts" / f"{name}.sh").exists()]
EVALUATION = {
    TRANSLATION: "fairseq-generate",
    MASKED_LM: "moa-fairseq score",
    CAUSAL_LM: "fairseq-eval-lm",
    CLASSIFICATION: "moa-fairseq score",
}


def test_rows_with_printed_zero_shot_accuracies_have_the_tasks():
    """SwitchHead's Tables 4 and 8: a task of the recipe for each metric of a column."""
    checked = 0
    for table in json.loads(
        (ROOT / "results" / "papers" / "switchhead.json").read_text("utf-8")
    )["tables"]:
        printed = {
            column.get("metric") for column in table["columns"].values()
        } & RESULT_TASKS.keys()
        for row in table["rows"] if printed else ():
            for name in row["experiments"]:
                tasks = shipped(RECIPES[name.partition(":")[0]]).zero_shot
                assert {RESULT_TASKS[metric][0] for metric in printed} <= {*tasks}, name
                checked += 1
    assert checked >= 12


LM_SCHEDULE = {"warmup-updates": 240000, "lr-period-updates": 46000}
shipped = functools.cache(load_recipe)  # treat as read-only
V100S = Hardware(8, "V100", (7, 0), tuple("01234567"))


@pytest.mark.thorough(keep="moa_b")
@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("hardware", [Hardware(), V100S], ids=["cpu", "8gpu"])
def test_fairseq_accepts_the_training_line(path, hardware, shown):
    recipe = shipped(path)
    plan = shown(recipe, hardware, Options())
    # What the embedded corpus begins with
    plan = [command for command in plan if command[1] != "corpus"]
    programs = [
        " ".join(command[:2]) if command[0] == "moa-fairseq" else command[0] for command in plan
    ]
    # Which evaluates what is trained
    train = ["fairseq-train"] if recipe.finetune != "noft" else []
    average = ["moa-fairseq average"] if recipe.average else []
    texts = 2 if recipe.kind == CLASSIFICATION else 1  # sentences and classes
    prepare = ["fairseq-preprocess"] * texts
    expected = [*prepare, *train, *average, EVALUATION[recipe.kind]]
    assert programs[: len(expected)] == expected


@pytest.mark.thorough(keep="moa")
@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_header(path):
    header = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8")).group(0)
    launch = f"moa-fairseq recipe {path.stem}"
    if path.stem in SCRIPTS:
        launch = f"bash scripts/{path.stem}.sh"
    for word in ("Reproduces:", "Hardware", f"Launch: {launch}", "Override", "--set"):
        assert word in header
    for override in re.findall(r"--set (\S+)", header):
        load_recipe(path, [override])


def test_numbers_of_the_headers_are_those_that_were_measured():
    """`10.66 BLEU (results/measured)` and the like: a run of that experiment scored this."""
    measured = {}
    for path in sorted((ROOT / "results" / "measured").glob("*.json")):
        run = json.loads(path.read_text("utf-8"))
        measured.setdefault(run["experiment"], []).append(run)
    checked = 0
    for path in CONFIGS:
        header = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8")).group(0)
        for line in (line for line in header.splitlines() if "results/measured" in line):
            for number in re.findall(r"([\d.]+) BLEU", line):
                scores = [run["metrics"]["multi_bleu"] for run in measured[path.stem]]
                digits = len(number.partition(".")[2])
                assert number in [f"{score:.{digits}f}" for score in scores], (
                    f"{path.name}: {line}"
                )
                checked += 1
            for number in re.findall(r"(\d+) minutes of training", line):
                minutes = [run["train_seconds"] / 60 for run in measured[path.stem]]
                assert any(abs(found - int(number)) < 0.6 for found in minutes), (
                    f"{path.name}: {line}"
                )
    assert checked >= 4


def test_a_name_is_that_of_one_recipe():
    """It stands for the recipe without its folder: in commands, `base:`, studies and records."""
    folders = [folder for folder in (ROOT / "configs").iterdir() if folder.is_dir()]
    names = [
        path.stem
        for folder in folders
        if folder.name != "studies"
        for path in folder.glob("*.yaml")
    ]
    parts = {path.stem for path in (ROOT / "configs" / "parts").glob("*.yaml")}
    assert len(names) == len(set(names)) and set(names) == {*RECIPES} | parts
    assert not list((ROOT / "configs").glob("*.yaml")), (
        "a recipe lies in the folder of its data set"
    )
    assert max(len(list(folder.iterdir())) for folder in [ROOT / "configs", *folders]) <= 20


@functools.cache
def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_a_config_restates_nothing_of_its_bases(path):
    """But the paper's cell and a model's sizes, which are read as a whole."""

    def restated(own, base, prefix=""):
        for key, value in own.items():
            if isinstance(value, dict) and isinstance(base.get(key), dict):
                yield from restated(value, base[key], f"{prefix}{key}.")
            elif key in base and base[key] == value:
                yield prefix + key

    own = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = own.pop("base", [])
    base = {}
    for name in names if isinstance(names, list) else [names]:
        layer = read(find_recipe(Path(name), path.parent))
        base = OmegaConf.to_container(OmegaConf.merge(base, layer))
    whole = ("reproduces.", "model.num_experts", "model.experts_per_token", "model.expert_dim")
    assert [key for key in restated(own, base) if not key.startswith(whole)] == []


def test_every_part_is_a_base_of_several():
    text = [path.read_text(encoding="utf-8") for path in CONFIGS]
    for part in (ROOT / "configs" / "parts").glob("*.yaml"):
        assert sum(f"parts/{part.name}" in config for config in text) >= 2, part.name


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_papers_own_models_have_a_link(path):
    """Those that stand for a row of theirs; others run by `moa-fairseq recipe NAME` alone."""
    recipe = shipped(path)
    own = recipe.model.arch.startswith(("moa_", "mae_", "switchhead_", "switchall_", "moh_"))
    script = ROOT / "scripts" / f"{path.stem}.sh"
    assert script.is_symlink() == bool(own and recipe.reproduces)


def test_scripts():
    """Most are links to one."""
    for script in {(ROOT / "scripts" / f"{name}.sh").resolve() for name in SCRIPTS}:
        assert script.stat().st_mode & 0o111
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 5


# What the papers say of each file of a name: flags of the training, and other keys.
PAPERS = yaml.safe_load("""
# Table 6: 8192 x 32 and 4096 x 64 are the same update; Eq. 17: alpha 0.01, beta 0.001
wmt14_*_moa_*: {load-balance-coef: 0.01, z-loss-coef: 0.001, train.effective_batch_tokens: 262144,
  score.headline: multi_bleu, score.flags: {also: moa-release}}
# MoA's Tables 5 and 6, section 5.2
wikitext103_mlm_*: {tokens-per-sample: 128, lr: 0.0006, lr-scheduler: polynomial_decay, warmup-updates: 2000,
  dropout: 0.1, attention-dropout: 0, activation-dropout: 0, train.effective_batch_tokens: 524288,
  train.max_epoch: 60, reproduces.table: "2", reproduces.column: PPL, score.subsets: [test]}
wikitext103_mlm_moa_*: {load-balance-coef: 0.01, z-loss-coef: 0.001}
"*nobcd*": {bcd: none, gate-optimizer: sgd, gate-lr: 1.0}  # MAE's appendix A
# facebookresearch/fairseq#346: 8 x 4096 tokens, 5e-4, 4,000 of warm-up, a save each 1,000
wmt14_ende_base: {lr: 0.0005, warmup-updates: 4000, warmup-init-lr: 1e-07, clip-norm: 0.0,
  save-interval-updates: 1000, label-smoothing: 0.1, weight-decay: 0.0, train.effective_batch_tokens: 32768,
  average.updates: 5, average.epochs: null, model.arch: transformer_wmt_en_de, train.task: translation,
  generate.beam: 5, generate.lenpen: 0.6, reproduces.row: BASE, reproduces.value: 27.6}
# the text of the other rows of its table
iwslt14_ende_mae7_*: {data.recipe: iwslt14_de_en_cased, data.source: en, data.target: de,
  generate.subsets: [valid]}
iwslt14_ende_mae7_scratch: {model.arch: mae_transformer_iwslt_de_en, data.bpe: 10000,
  reproduces.row: SCRATCH, reproduces.value: 28.8}
# MoH's Table E: 2,048 tokens, 4M an update, 100 billion in all, down to a tenth; Eq. 8: beta 0.01
text_lm_moh_*: {tokens-per-sample: 2048, train.effective_batch_tokens: 4194304, train.max_update: 23842,
  warmup-init-lr: 1e-07, weight-decay: 0.1, clip-norm: 1.0, load-balance-coef: 0.01, data.bpe: 65536}
text_lm_moh_small: {lr: 0.0003, min-lr: 0.00003, warmup-updates: 2000}
text_lm_moh_large: {lr: 0.0005, min-lr: 0.00005, warmup-updates: 500}
""")


@pytest.mark.parametrize("pattern", PAPERS)
def test_the_papers_settings(pattern):
    found = 0
    for path in (RECIPES[name] for name in fnmatch.filter(NAMES, pattern)):
        recipe = shipped(path)
        found = found + 1
        for key, value in PAPERS[pattern].items():
            said = (
                operator.attrgetter(key)(recipe) if "." in key else recipe.training_flags[key]
            )
            assert said == value or float(said) == float(value), f"{path.stem}: {key}"
    assert found


@pytest.mark.parametrize("name, row", [("small", "MoH-LLM-S"), ("large", "MoH-LLM-B")])
def test_mohs_language_models_have_the_printed_parameters(name, row):
    tables = json.loads((ROOT / "results" / "papers" / "moh.json").read_text(encoding="utf-8"))[
        "tables"
    ]
    (printed,) = {
        each["values"]["# Params."]
        for each in tables[2]["rows"]
        if each["row"].startswith(f"{row} ")
    }
    recipe = load_recipe(RECIPES[f"text_lm_moh_{name}"])
    sizes = recipe.model
    heads = ["--experts-per-token", str(sizes.experts_per_token)]
    heads += ["--moh-shared-heads", str(sizes.flags["moh-shared-heads"])]
    counted = complexity(sizes.arch, recipe.data.bpe, model_flags=heads).total_parameters
    assert round(counted, -6) == printed
    assert recipe.train.max_update * recipe.train.effective_batch_tokens == pytest.approx(
        100e9, rel=1e-3
    )
    assert f"{printed / 1e6:.0f}M" in recipe.summary


@pytest.mark.parametrize(
    "path", [p for p in CONFIGS if re.match("(wmt14|wikitext103_mlm).*_moa_", p.stem)]
)
def test_the_sizes_in_a_recipes_words_are_those_of_its_model(path):
    recipe = shipped(path)
    sizes = f"{recipe.model.experts_per_token}K{recipe.model.num_experts}E{recipe.model.expert_dim}D"
    assert sizes in recipe.summary
    if recipe.kind == MASKED_LM:
        assert (
            path.stem.endswith(sizes.lower())
            and recipe.model.arch == f"moa_roberta_{sizes.lower()}"
        )
        assert sizes in recipe.reproduces.row


@pytest.mark.parametrize(
    "path",
    [p for p in CONFIGS if fnmatch.fnmatch(p.stem, "*_moa_*_release")],
    ids=lambda p: p.stem,
)
def test_a_release_recipe_is_the_papers_but_for_what_the_released_code_does(path):
    """And each has a row of its own, so that its runs are not averaged with those of the paper's settings."""
    paper, release = (
        shipped(path.with_stem(stem))
        for stem in (path.stem.removesuffix("_release"), path.stem)
    )
    assert (
        release.model.flags
        == {**paper.model.flags, "router-renormalize": "none"}
        != paper.model.flags
    )
    assert (
        release.train.flags
        == {**paper.train.flags, "aux-loss-scale": "none"}
        != paper.train.flags
    )
    assert (release.data, release.generate, release.score) == (
        paper.data,
        paper.generate,
        paper.score,
    )
    assert (release.model.arch, release.average) == (paper.model.arch, paper.average)
    assert plan_batch(release.train, 1) == plan_batch(paper.train, 1)
    header = path.read_text(encoding="utf-8").partition("base:")[0]
    assert paper.experiment in header
    if release.reproduces:
        assert release.reproduces.row != paper.reproduces.row
        assert release.reproduces.value == paper.reproduces.value
        assert release.experiment in path.with_stem(paper.experiment).read_text(
            encoding="utf-8"
        )


@pytest.mark.thorough
def test_each_recipe_stands_for_a_row_that_there_is():
    rows = {}
    for path in (ROOT / "results" / "papers").glob("*.json"):
        paper = json.loads(path.read_text(encoding="utf-8"))
        for table in paper["tables"]:
            rows.update(
                {(paper["paper"], table["table"], row["row"]): row for row in table["rows"]}
            )
    found = 0
    for recipe in map(shipped, CONFIGS):
        for name in (None, *recipe.rows):
            one = load_recipe(
                RECIPES[recipe.experiment], row_overrides(recipe, name) if name else ()
            )
            cell = one.reproduces
            if cell:
                row = rows[cell.paper, cell.table, cell.row]
                entry = f"{recipe.experiment}: {name}" if name else recipe.experiment
                assert one.row == name and entry in row["experiments"]
                assert row["values"][cell.column] == cell.value
                found += name is not None
    assert (
        found >= 14 + 5 + 3 + 12 + 6 + 2
    )  # of MoA, MAE twice, SwitchHead on C4 and peS2o, beside MoA, with RoPE


@pytest.mark.thorough(keep=("moa_big", "mlm", "_lm_", "one_expert"))
@pytest.mark.parametrize(
    "path",
    [p for p in CONFIGS if "rows:" in p.read_text(encoding="utf-8")],
    ids=lambda p: p.stem,
)
def test_fairseq_accepts_each_row_and_its_model_is_the_counted_one(path):
    recipe = shipped(path)
    rows = {}
    for paper in (ROOT / "results" / "papers").glob("*.json"):
        for table in json.loads(paper.read_text(encoding="utf-8"))["tables"]:
            for row in table["rows"]:
                rows.update({name: row for name in row["experiments"]})
    for name in recipe.rows:
        one = load_recipe(path, row_overrides(recipe, name))
        args = check_flags(one)
        row = rows[f"{recipe.experiment}: {name}"]
        for flag, value in itertools.pairwise(row.get("model_flags", ())):
            if flag.startswith("--"):
                said = getattr(args, flag[2:].replace("-", "_"))
                assert value.startswith("--") or str(said) == value, f"{name}: {flag}"
        assert row.get("arch", one.model.arch) == one.model.arch


@pytest.mark.parametrize(
    ("dense", "mixture", "schedule"),
    [
        ("wikitext103_mlm_transformer", "wikitext103_mlm_moa_8k8e256d", {}),
        ("wikitext2_mlm_transformer_tiny", "wikitext2_mlm_moa_4k16e48d_tiny", {}),
        ("quickstart_transformer", "quickstart_moa", {}),
        *(
            ("multi30k_ende_transformer_tiny", f"multi30k_ende_{name}_tiny", {})
            for name in ("moa", "mae", "nobcd", "uni_mae")
        ),
        ("iwslt14_deen_base", "iwslt14_deen_mae6", {}),
        # MAE's Appendix A gives its own models another warm-up than their baselines.
        *(
            ("wmt14_ende_base", f"wmt14_ende_{name}", {"warmup-updates": 8000})
            for name in ("mae7", "mae6", "nobcd", "uni_mae7", "uni_mae6")
        ),
        *(
            ("wikitext103_lm_base", f"wikitext103_lm_{name}", LM_SCHEDULE)
            for name in ("mae7", "nobcd", "uni_mae7")
        ),
        # SwitchHead's Tables 1-3 and 7; Table 9 clips SwitchAll's gradients otherwise.
        *(
            (f"wikitext103_lm_transformer_xl_{size}", f"wikitext103_lm_{name}_{size}", clipping)
            for size in ("47m", "262m")
            for name, clipping in (("switchhead", {}), ("switchall", {"clip-norm": 0.25}))
        ),
        ("wikitext103_lm_transformer_rope_45m", "wikitext103_lm_switchhead_rope_45m", {}),
        ("wikitext103_lm_transformer_rope_244m", "wikitext103_lm_switchhead_rope_243m", {}),
        ("enwik8_lm_transformer_xl", "enwik8_lm_switchhead", {}),
        *(
            (f"{data}_lm_transformer_xl_{size}", f"{data}_lm_{name}_{size}", clipping)
            for data in ("c4", "pes2o")
            for size in ("47m", "262m")
            for name, clipping in (("switchhead", {}), ("switchall", {"clip-norm": 0.25}))
        ),
        ("c4_lm_transformer_rope_45m", "c4_lm_switchhead_rope_45m", {}),
        ("c4_lm_transformer_rope_244m", "c4_lm_switchhead_rope_243m", {}),
        *(
            ("wikitext2_lm_transformer_xl_tiny", f"wikitext2_lm_{name}_tiny", {})
            for name in (
                "moa",
                "switchhead",
                "switchhead_e1",
                "switchall",
                "transformer_xl_2heads",
            )
        ),
        ("listops_transformer_8h", "listops_transformer_2h", {}),
        ("listops_transformer_8h", "listops_switchhead_2h", {}),
    ],
)
def test_pairs_differ_in_the_model_and_the_schedule_only(dense, mixture, schedule):
    one, other = (shipped(RECIPES[name]) for name in (dense, mixture))
    assert (
        one.data == other.data
        and one.generate == other.generate
        and one.average == other.average
    )
    routing = ("balance-loss", "load-balance-coef", "z-loss-coef", "bcd", "gate-")

    def flags(recipe):
        said = recipe.train.flags.items()
        return {
            key: value
            for key, value in said
            if value is not None and not key.startswith(routing)
        }

    assert flags(other) == {**flags(one), **schedule}
    assert plan_batch(one.train, 1) == plan_batch(other.train, 1)


LARGE = ("262m", "244m", "243m")


@pytest.mark.parametrize(
    "path",
    [p for p in CONFIGS if "paper: switchhead" in p.read_text(encoding="utf-8")],
    ids=lambda p: p.stem,
)
def test_switchheads_settings(path):
    """Table 9 and appendix A.5; the batch on enwik8 is that of the authors' settings."""
    recipe = shipped(path)
    texts = 32 if "enwik8" in path.stem else 64
    flags = recipe.train.flags
    large = any(size in path.stem for size in LARGE)
    length = flags["tokens-per-sample"]
    assert (
        recipe.train.effective_batch_tokens == texts * length
        and recipe.train.max_update == 100000
    )
    assert (flags["optimizer"], flags["lr"], flags["lr-scheduler"]) == (
        "adam",
        0.00025,
        "cosine",
    )
    assert flags["warmup-updates"] == (4000 if large else 0)
    assert flags["lr-period-updates"] == 100000 - flags["warmup-updates"]
    small_and_dense = not large and "enwik8" not in path.stem and "switchall" not in path.stem
    assert flags["clip-norm"] == (0.1 if small_and_dense else 0.25)
    rope = "rope" in path.stem
    assert (
        length == {True: 1024, False: 512}[rope]
        if large
        else 512
        if rope or "enwik8" in path.stem
        else 256
    )
    assert flags.get("carried-chunks") == (None if rope else 1)
    assert recipe.score.flags["tokens-per-sample"] == length
    assert recipe.score.flags.get("carried-chunks") == flags.get("carried-chunks")
    if "moa" not in path.stem:  # every row has a loss of its own
        assert flags.get("z-loss-coef", 0) == 0
    validated = recipe.reproduces.table == "1" or recipe.data.recipe in ("c4", "pes2o")
    assert recipe.subsets[0] == ("valid" if validated else "test")
    if recipe.data.recipe in ("c4", "pes2o"):  # section 3: the first 10^5 T N tokens
        tokens = recipe.data.tokens or datasets()[recipe.data.recipe].tokens["train"]
        assert tokens == 100000 * texts * length


@pytest.mark.thorough
def test_a_tuned_recipe_converts_its_dense_model_first(tmp_path):
    script = ["bash", str(ROOT / "scripts" / "multi30k_ende_moh_tuned_75.sh")]
    done = subprocess.run(script, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 2
    assert (
        "convert: error: Checkpoint runs/multi30k_ende_transformer_tiny/average.pt"
        in done.stderr
    )
    planned = subprocess.run(
        [*script, "--dry-run"], cwd=tmp_path, text=True, capture_output=True, check=True
    )
    assert "--finetune-from-model runs/multi30k_ende_moh_tuned_75.pt" in planned.stdout
    assert not list(tmp_path.iterdir())
