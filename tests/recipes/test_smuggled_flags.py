"""A recipe or run folder from a stranger is data: none of its values may become a flag of a program."""

import json

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.recipes.hardware import Hardware
from moa_fairseq.recipes.loading import load_recipe
from moa_fairseq.recipes.runner import Options, planned_commands, prepared_before
from moa_fairseq.running import command_line


@pytest.fixture
def trap(tmp_path):
    """A folder that writes `marker` beside itself when fairseq takes it for --user-dir."""
    folder = tmp_path / "trap"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import pathlib\npathlib.Path(__file__).resolve().parent.with_name('marker').write_text('ran')\n"
    )
    return folder


def test_a_list_cannot_bring_another_user_dir(trap, small, write_config, toy_data, tmp_path, capsys):
    small["data"]["recipe"] = "binarised"
    small["train"]["flags"]["lr"] = [0.01, "--user-dir", str(trap)]
    line = ["recipe", str(write_config(small)), "--data", str(toy_data), "--gpus", "0", "--stage", "train"]
    assert main([*line, "--save-dir", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "marker").exists() and not (tmp_path / "run").exists()
    error = capsys.readouterr().err
    assert "train.flags.lr" in error and "'--user-dir'" in error and "small.yaml" in error


@pytest.mark.parametrize("section", ["data", "model", "train", "generate", "score"])
@pytest.mark.parametrize("item", ["--user-dir", "--user-dir=/x", "-s", "--", ">"])
def test_no_section_takes_a_flag_or_a_redirection_in_a_list(small, write_config, section, item):
    small[section].setdefault("flags", {})["some-name"] = [1, item]
    with pytest.raises(UserError, match=rf"small\.yaml: {section}\.flags\.some-name: .*{item}"):
        load_recipe(write_config(small))


def test_numbers_below_zero_and_other_text_stay_values(small, write_config):
    small["train"]["flags"].update({"lr": [-1, "-2.5", "-1e-3", "0.5"], "adam-betas": "(0.9, 0.98)"})
    recipe = load_recipe(write_config(small))
    line = command_line.flags(recipe.train.flags)
    assert line[line.index("--lr") + 1 :][:4] == ["-1", "-2.5", "-1e-3", "0.5"]


def test_a_value_that_looks_like_a_redirection_is_refused(small, write_config):
    small["train"]["flags"]["tensorboard-logdir"] = ">"
    with pytest.raises(UserError, match=r"train\.flags\.tensorboard-logdir: .*'>'"):
        load_recipe(write_config(small))


@pytest.mark.parametrize(
    ("section", "name"), [("data", "user-dir"), ("train", "user-dir"), ("generate", "user-dir")]
)
def test_the_plugin_folder_is_nobodys_to_choose(small, write_config, section, name):
    small[section].setdefault("flags", {})[name] = "/x"
    with pytest.raises(UserError, match=rf"{section}\.flags\.{name}: is not a free flag"):
        load_recipe(write_config(small))


def test_flags_made_elsewhere_are_checked_too():
    with pytest.raises(UserError, match=r"--lr.*'--user-dir'"):
        command_line.flags({"lr": ["--user-dir", "x"]})


def test_a_folder_named_like_a_flag_is_one(small, write_config, tmp_path, monkeypatch, make_binarised):
    """state.json of a stranger's run folder names the data, which is no flag of fairseq-train."""
    monkeypatch.chdir(tmp_path)
    data = make_binarised(tmp_path / "--user-dir=trap")
    folder = tmp_path / "run"
    folder.mkdir()
    state = {"prepare": {"folder": data.name, "sentences": {}, "fingerprint": "x", "source": None}}
    (folder / "state.json").write_text(json.dumps(state))
    recipe = load_recipe(write_config(small))
    options = Options(data=prepared_before(recipe, Options(save_dir=folder)), save_dir=folder)
    for command in planned_commands(recipe, Hardware(), options):
        assert "--user-dir=trap" not in command
        assert command[0] not in ("fairseq-train", "fairseq-generate") or command[1].endswith(f"/{data.name}")
