"""What the documents say can be typed, what they link to is there, what is generated is fresh."""

import argparse
import ast
import functools
import importlib.util
import re
import shlex
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_INV_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from recorded_values import fill_values, value
from test_rooms import ROOMS

from moa_fairseq.cli import VERBS, build_parser, main
from moa_fairseq.experiments.analysis.command import KINDS
from moa_fairseq.experiments.recipes.loading import find_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "configs", "data-prep", "docs", "results")
PATHS = sorted(
    [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
)
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS
}

# Of other programs, and of a scorer of fairseq's that translation does not use.
OTHER_WORDS = ("source", "pip", "sacrebleu", "for", "echo", "done")
OTHERS_FLAGS = {
    "--help",
    "--bpe-codes",
    "--sentencepiece-model",
    "--wer-args",
    "--paired-ar",
    "--force",
    "--array",
    "--wrap",
    "--data-binary",
    "--hypothesis-seed",
}


def arguments_in(docstring):
    """Names in the section `Args:`."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, re.M)
    named = re.findall(r"^    ([\w*]+(?:, [\w*]+)*): ", section[1], re.M) if section else []
    return [name.strip("*") for names in named for name in names.split(", ")]


def test_docstrings_name_arguments_that_are_there():
    wrong = []
    checked = 0
    for path in sorted((ROOT / "moa_fairseq").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                documented = arguments_in(ast.get_docstring(node) or "")
                there = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
                checked += len(documented)
                twice = len(documented) != len({*documented})
                wrong += [
                    f"{path}:{node.lineno}: {name}"
                    for name in documented
                    if twice or name not in there
                ]
    assert checked > 1000 and not wrong, "\n".join(wrong)


def blocks(document, language):
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENTS[document], re.S)


def shell_lines():
    """(document, words) of every line in a bash block; a continued line is one."""
    for document in DOCUMENTS:
        for text in blocks(document, "bash"):
            for line in text.replace("\\\n", " ").replace("${m}", "moa").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):  # of the environment
                    words.pop(0)
                if words:
                    yield pytest.param(
                        document, words, id=f"{document}: {' '.join(words)}"[:110]
                    )


REGISTRIES = {"model": MODEL_REGISTRY, "task": TASK_REGISTRY, "criterion": CRITERION_REGISTRY}


@functools.cache
def known_flags():
    """Every flag of fairseq's commands with the plugin, of moa-fairseq's verbs, and of the scripts."""
    known = set(OTHERS_FLAGS)
    own = {
        kind: [
            name
            for name, entry in registry.items()
            if entry.__module__.startswith("moa_fairseq.")
        ]
        for kind, registry in REGISTRIES.items()
    }
    # Each model, task and criterion once; they need not fit together, since nothing is built.
    kinds = zip_longest(own["model"], own["task"], own["criterion"])
    names = set()
    for model, task, criterion in kinds:
        arch = next(iter(ARCH_MODEL_INV_REGISTRY[model or own["model"][0]]))
        words = ["data", "--arch", arch, "--task", task or "translation"]
        words += ["--criterion", criterion or "label_smoothed_cross_entropy"]
        for optimizer in (
            ["--optimizer", "adam"],
            ["--optimizer", "sgd", "--lr-scheduler", "inverse_sqrt"],
        ):
            names |= set(
                vars(
                    options.parse_args_and_arch(
                        options.get_training_parser(), words + optimizer
                    )
                )
            )
    generation = [
        options.get_generation_parser(),
        options.get_interactive_generation_parser(),
        options.get_eval_lm_parser(),
        options.get_preprocessing_parser(),
    ]
    parsers = [*generation, *(build_parser([verb]) for verb in VERBS)]
    while parsers:
        for action in parsers.pop()._actions:
            known |= {flag for flag in action.option_strings if flag.startswith("--")}
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    scripts = [
        *ROOT.glob("scripts/**/*.sh"),
        *ROOT.glob("benchmarks/*.py"),
        *ROOT.glob("docs/*.py"),
    ]
    scripts += ROOT.glob("moa_fairseq/plugin/*.py")  # flags without a default leave no name
    for script in scripts:
        known |= set(re.findall(r"--[a-z][\w-]*", script.read_text(encoding="utf-8")))
    flags = {name.replace("_", "-") for name in names}
    return known | {f"--{flag}" for flag in flags} | {f"--no-{flag}" for flag in flags}


def slug(heading):
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_linked_or_named_is_there(document):
    text = DOCUMENTS[document]
    missing = []
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        target = (ROOT / document).parent / file if file else ROOT / document
        if not target.exists():
            missing.append(link)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            missing += [] if anchor in map(slug, headings) else [link]
    named = set(
        re.findall(
            r"(?<![\w/.-])((?:scripts|data-prep|benchmarks|docs|tests)/[\w/-]+\.(?:sh|py))",
            text,
        )
    )
    missing += [
        name for name in named if not (re.search("[A-Z]", name) or (ROOT / name).exists())
    ]
    assert not missing


@pytest.mark.parametrize(
    "document", [name for name in DOCUMENTS if not name.startswith("results/studies")]
)
def test_names_of_the_package_are_there(document):
    """moa_fairseq.MODULE, or a name in it."""
    missing = []
    for name in re.findall(r"(?<![\w./-])moa_fairseq(?:\.[a-z]\w*)+", DOCUMENTS[document]):
        path = ROOT.joinpath(*name.split("."))
        parent = importlib.import_module("moa_fairseq")
        if not (
            path.is_dir() or path.with_suffix(".py").is_file() or hasattr(parent, path.name)
        ):
            missing.append(name)
    assert not missing


@pytest.mark.parametrize(
    "document, words",
    [
        (
            "docs/huggingface.md",
            ["AutoModel", "before"],
        ),  # a saved mixture needs the import first
        ("docs/fairseq.md", ["--include-path", "!function"]),  # runs code
    ],
)
def test_a_document_warns(document, words):
    assert all(word in DOCUMENTS[document] for word in words)


@pytest.mark.parametrize(
    "verb, words",
    [
        ([], ["mixtures of attention heads"]),
        (["analyze", "induction-heads"], ["2209.11895", "four times", "least common"]),
    ],
)
def test_help_says_what_it_is_for(verb, words, capsys):
    with pytest.raises(SystemExit):
        main([*verb, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(word in text for word in words)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_verbs_are_verbs(document):
    text = DOCUMENTS[document]
    for verb, kind in re.findall(
        r"moa-fairseq (?:--user-dir \S+ )?([a-z][\w-]*)(?: ([a-z][\w-]*))?", text
    ):
        assert verb in VERBS, f"moa-fairseq {verb}"
        assert verb != "analyze" or kind in {"", *(known.NAME for known in KINDS)}, (
            f"analyze {kind}"
        )


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0 and "usage: moa-fairseq" in capsys.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_are_flags(document):
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", DOCUMENTS[document]))
    assert flags <= known_flags(), flags - known_flags()


@pytest.mark.parametrize("document, words", shell_lines())
def test_a_line_is_understood_by_its_program(document, words):
    if "--help" in words:
        return
    if "--wrap" in words:  # Slurm's: what a job does
        words = shlex.split(words[words.index("--wrap") + 1])
    if words[0] == "moa-fairseq":
        args = build_parser(words[1:]).parse_args(words[1:])
        if words[1] == "study" and args.records is None and not (args.report or args.pack):
            study = args.study.stem + "_tuning" * args.tune
            records = ROOT / "results" / "studies" / study / "records.jsonl"
            assert not records.exists(), "the study stops: these runs have another commit"
        if words[1] == "recipe" and not words[2].startswith("my_"):
            assert find_recipe(Path(words[2])).is_file(), words[2]
    elif words[0] in ("bash", "sbatch"):
        script = next(word for word in words[1:] if word.endswith(".sh"))
        rest = words[words.index(script) + 1 :]
        assert (ROOT / script).is_file()
        name = rest.pop(0) if script.startswith("scripts/launch/") else Path(script).stem
        if script.endswith("torchrun.sh") and "--" in rest:
            del rest[rest.index("--") :]  # what follows is torchrun's
        if name in shipped_recipes():
            build_parser(["recipe"]).parse_args(["recipe", name, *rest])
        else:
            assert not script.startswith("scripts/launch/"), name
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    else:
        assert words[0].startswith("fairseq-") or words[0] in OTHER_WORDS, words[0]


@pytest.mark.thorough
def test_dry_run_lines_print_commands():
    lines = [line.values[1] for line in shell_lines() if "--dry-run" in line.values[1]]
    assert lines
    for words in {tuple(words): words for words in lines}.values():
        if words[0] == "bash":
            words = ["moa-fairseq", "recipe", Path(words[1]).stem, *words[2:]]
        if words[2] in shipped_recipes():
            assert "$ fairseq-train" in dry_run(ROOT, *words[2:])


def test_the_study_of_the_guide_can_start(tmp_path, capsys):
    (example,) = blocks("docs/controls.md", "yaml")
    (tmp_path / "branch.yaml").write_text(example, encoding="utf-8")
    records = ["--records", str(tmp_path)]
    assert (
        main(
            [
                "study",
                str(tmp_path / "branch.yaml"),
                "--data",
                str(tmp_path),
                "--dry-run",
                *records,
            ]
        )
        == 0
    )
    assert {"D-seed1", "DS-seed8", "L-seed8"} <= set(capsys.readouterr().out.split())


@pytest.mark.thorough
def test_the_guide_to_own_data_can_be_followed(tmp_path):
    for recipe in blocks("docs/own-data.md", "yaml"):
        (tmp_path / recipe.split()[1]).write_text(recipe, encoding="utf-8")
    texts = {
        "my_pairs": [
            f"{split}.{side}"
            for split in ("train", "valid", "test")
            for side in ("fr", "en", "ja", "am")
        ]
    }
    texts["my_text"] = [f"{split}.txt" for split in ("train", "valid", "test")]
    for folder, names in texts.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("one line of text\n" * 20, encoding="utf-8")
    lines = [
        line.values[1]
        for line in shell_lines()
        if line.id.startswith("docs/own-data.md: moa-fairseq recipe")
    ]
    assert len(lines) >= 3
    for words in lines:
        assert "$ fairseq-train" in dry_run(tmp_path, *words[2:], *{"--dry-run"} - set(words))


def dry_run(folder, *words):
    """What `moa-fairseq recipe` prints for these words in a folder."""
    command = [sys.executable, "-m", "moa_fairseq.cli", "recipe", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_examples_train():
    namespace = {}
    (example,) = blocks("README.md", "python")
    exec(example, namespace)
    assert namespace["y"].shape == namespace["x"].shape
    example, cross, decoder, compiled = blocks("docs/own-models.md", "python")
    exec(example, namespace)
    exec(decoder, namespace)
    (routing,) = namespace["routings"]
    assert routing.expert_ids.shape == (80, 8) and routing.num_experts == 32
    namespace["loss"].backward()
    block = namespace["Block"](32)
    x = torch.randn(2, 5, 32)
    assert block(x, torch.zeros(2, 5, dtype=torch.bool))[0].shape == x.shape
    exec(cross, namespace)
    assert namespace["y"].shape == (4, 20, 256)
    torch.manual_seed(0)
    model = namespace["Decoder"](6)
    text = torch.arange(20).remainder(6).repeat(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        logits, routings = model(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + namespace["losses_for"](model)(routings)).backward()
        optimizer.step()
    generated = model.generate(text[:2, :3], 8)
    assert torch.equal(generated, text[:2, :11])
    exec(compiled.replace("fullgraph=True", "fullgraph=True, backend='eager'"), namespace)
    assert torch.equal(namespace["generate_compiled"](model, text[:2, :3], 8), generated)
    logits, _ = model(generated)
    assert torch.equal(logits[:, 2:-1].argmax(-1), generated[:, 3:])  # as without a cache


def test_the_readme_is_short():
    lines = re.sub("<!--.*?-->", "", DOCUMENTS["README.md"]).splitlines()
    assert len(lines) <= 110
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    first = DOCUMENTS["README.md"].split("```")[1]  # installation comes before any other code
    assert (
        first.startswith("bash\n")
        and "bash scripts/setup.sh" in first
        and "pip install ." in first
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_numbers_in_the_text_are_those_of_the_records(document):
    """`python docs/generate.py --values` writes them anew."""
    assert fill_values(DOCUMENTS[document], document) == DOCUMENTS[document]


def test_a_number_in_the_text_is_filled_in():
    text = "MoA is <!-- frontier/MoA/size:1 -->9<!-- / --> to <!-- frontier/MoA/n --><!-- / --> worse."
    filled = "MoA is <!-- frontier/MoA/size:1 -->0.2<!-- / --> to <!-- frontier/MoA/n -->12<!-- / --> worse."
    assert fill_values(text, "page.md") == filled


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("frontier/MoA/difference:3", "+0.175"),
        ("translation/MoA/difference", "−0.85"),
        ("translation/MoA/range", "0.81 to 0.89"),
        ("frontier/multi-query/interval:3", "−0.011 to +0.010"),
        ("frontier/MoA/p", "1.2e-07"),
        ("frontier/systems/MoA/parameters", "855,808"),
        ("frontier/cache/MQA/cache_bytes", "128"),
        ("translation/BLEU/MoA/size:1", "4.6"),
        ("translation/BLEU/MoA/second:1", "18.2"),
        ("multi30k/at_equal_training_loss/selection/size", "0.06"),
        ("measured/multi30k_ende_transformer_tiny/metrics/multi_bleu", "41.55"),
        ("benchmarks/training-cuda/speed_over_dense/moa_transformer_base", "0.68"),
    ],
)
def test_a_name_of_a_number_finds_it(name, text):
    assert value(name) == text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a <!-- frontier/MoX/size -->1<!-- / -->", "MoX.*multi-query"),
        ("a <!-- frontier/MoA/sise -->1<!-- / -->", "sise.*mean"),
        ("a <!-- frontier/multi-query/range -->1<!-- / -->", "interval"),
        ("a <!-- fronteer/MoA/size -->1<!-- / -->", "fronteer"),
        ("a <!-- frontier/MoA/size -->1", "needs a <!-- / -->"),
        ("a\n- <!-- frontier/MoA/size -->1<!-- / -->", "begins a line"),
    ],
)
def test_a_number_that_cannot_be_filled_in_names_its_document(text, named):
    with pytest.raises(SystemExit, match=f"^page.md: .*{named}"):
        fill_values(text, "page.md")


@pytest.mark.thorough
def test_what_is_generated_is_fresh():
    """`python docs/generate.py` rewrites what is not. One test, because the parts take a while to make."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    parts = generate.parts()
    marked = {name for name, text in DOCUMENTS.items() if ":begin -->" in text}
    assert (
        marked == {name for name in generate.DOCUMENTS if name.endswith(".md")} - parts.keys()
    )
    stale = [
        name
        for name in generate.DOCUMENTS
        if fill_values(generate.fresh(name, parts), name) != (ROOT / name).read_text("utf-8")
    ]
    assert not stale, "out of date: run python docs/generate.py"
    for part in parts.keys() - {*generate.DOCUMENTS}:
        assert sum(f"<!-- {part}:begin -->" in text for text in DOCUMENTS.values()) == 1


def test_the_architecture_names_the_rooms_and_files_that_there_are():
    package = ROOT / "moa_fairseq"
    text = DOCUMENTS["ARCHITECTURE.md"]
    spans = set(re.findall(r"`([^`\n]+)`", text))
    named = {span.rstrip("/").removesuffix(".py").replace("/", ".") for span in spans}
    assert not {room for floor in ROOMS for room in floor} - named
    files = {span for span in spans if re.fullmatch(r"[\w/]+\.py", span)}
    assert not [file for file in files if not list(package.glob(f"**/{file}"))]


def test_the_toy_family_has_the_size_that_is_told():
    lines = sum(
        len(path.read_text().splitlines())
        for path in (ROOT / "tests" / "toy_family").glob("*.py")
    )
    assert re.findall(r"(\d+)\s+lines", DOCUMENTS["CONTRIBUTING.md"])[0] == str(lines)
