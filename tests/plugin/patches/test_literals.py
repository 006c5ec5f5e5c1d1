"""Settings are read as literals: what fairseq ships is read as `eval` reads it, and nothing else runs."""

import ast
import functools
import re
import sys
from argparse import Namespace
from pathlib import Path

import fairseq
import pytest
from fairseq import utils
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig

import moa_fairseq
from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.literals import MAX_ITEMS, literal

FAIRSEQ = Path(fairseq.__file__).parent


@functools.cache
def sources():
    paths = [path for path in sorted(FAIRSEQ.rglob("*.py")) if "examples" not in path.parts]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def calls_eval(tree):
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("eval", "exec")
        for node in ast.walk(tree)
    )


@pytest.mark.thorough
def test_no_module_of_fairseq_has_the_real_eval():
    """Of a new version, too: every module that calls eval is loaded with the plugin and reads literals."""
    names = []
    for path, tree in sources():
        if calls_eval(tree):
            parts = path.relative_to(FAIRSEQ.parent).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert (
        "fairseq.models.fconv" in names
        and "fairseq.criterions.ctc" in names
        and len(names) > 15
    )
    assert [
        name for name in names if getattr(sys.modules.get(name), "eval", None) is not literal
    ] == []


def test_what_fairseq_ships_is_read_as_before():
    """Each text in fairseq's sources that looks like a setting: [(512, 3)] * 20, (0.9, 0.999), ..."""
    texts = {
        node.value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"\[\(|\(\d", node.value)
    }
    same = 0
    for text in texts:
        try:
            expected = eval(text, {"__builtins__": {}})
        except Exception:
            continue  # a help text, a pattern
        if not callable(expected) and expected != [...] and "..." not in text:
            assert literal(text) == expected
            same += 1
    assert same >= 12 and "[(512, 3)] * 20" in texts


@pytest.mark.parametrize(
    "text",
    [
        "1",
        " -2.5 ",
        "'a'",
        "True",
        "None",
        "1 + 2 * 3 - 4",
        "{'a': [1, (2,)]}",
        "[1] + 2 * [3]",
        "{1, 2}",
    ],
)
def test_literals(text):
    assert literal(text) == eval(text)


REFUSED = (
    *(
        "__import__('os')",
        "print",
        "print(1)",
        "[x for x in (1,)]",
        "(1).__class__",
        "lambda: 1",
        "f'{1}'",
    ),
    *(
        "[1][0]",
        "2 ** 99",
        "1 if 1 else 2",
        "{**{}}",
        "[*[1]]",
        "1 / 2",
        "'%d' % 1",
        "x := 1",
        "a = 1",
        "",
    ),
    *(
        "[1",
        "1; 2",
        "not 1",
        "1 < 2",
        "'a' + 1",
        "[1] * 1.5",
        "{1: 2} * 2",
        "{[]: 1}",
        "[1] * 10**9",
    ),
    *("[1] * 99999999999", "[[0] * 9999] * 9999", "'x' * 20000", "(" * 5000, "-" * 5000 + "1"),
)


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused(text):
    with pytest.raises(UserError, match="is refused"):
        literal(text)


def test_what_repetition_makes_is_bounded():
    assert len(literal(f"[0] * {MAX_ITEMS}")) == MAX_ITEMS
    assert len(literal(f"{MAX_ITEMS} * [0]")) == MAX_ITEMS
    for text in (
        f"[0] * {MAX_ITEMS // 2} + [0] * {MAX_ITEMS // 2 + 1}",
        f"{MAX_ITEMS + 1} * [0]",
    ):
        with pytest.raises(UserError):
            literal(text)


def cutoffs(args):
    return utils.eval_str_list(args.adaptive_softmax_cutoff, type=int)


def test_the_name_of_the_setting_is_said():
    """Behind fairseq's helpers, too."""
    optimizer = object.__new__(FairseqAdam)
    optimizer.cfg = FairseqAdamConfig(adam_betas="open('x')", lr=[0.1])
    with pytest.raises(UserError, match="The setting adam_betas is refused: \"open\\('x'\\)\""):
        _ = optimizer.optimizer_config
    with pytest.raises(UserError, match="The setting adaptive_softmax_cutoff is refused"):
        cutoffs(Namespace(arch="x", adaptive_softmax_cutoff="open('x')"))
    with pytest.raises(UserError, match="A setting of the configuration is refused"):
        utils.eval_str_list("ope" + "n('y')")
    assert cutoffs(Namespace(adaptive_softmax_cutoff="[10, 20]")) == [10, 20]
    assert utils.eval_bool("True") is True and utils.eval_bool(None, default=True) is True
    # As before: what is not text is the default
    assert utils.eval_bool(True, default=False) is False


def test_a_recipe_cannot_have_the_overrides_evaluated(
    fairseq, toy_data, toy_checkpoint, tmp_path
):
    marker = tmp_path / "marker"
    overrides = f"{{'x': __import__('pathlib').Path({str(marker)!r}).touch()}}"
    options = ("--user-dir", moa_fairseq.__path__[0], "--cpu", "--path", toy_checkpoint)
    options += ("--model-overrides", overrides, "--task", "translation", "--max-tokens", 400)
    done = fairseq("validate", toy_data, *options, check=False)
    assert done.returncode and not marker.exists() and "Traceback" not in done.stderr
    assert "error: The setting model_overrides is refused" in done.stderr
