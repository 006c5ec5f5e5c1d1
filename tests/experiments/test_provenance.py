"""Which commit and versions a maker writes, and what several sessions say together."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records import provenance

PACKAGE = Path(provenance.__file__).resolve().parents[2]


def git(folder, *words):
    own = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *own, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A repository with this file alone, in the place that it has in the package."""
    monkeypatch.delenv("MOA_FAIRSEQ_COMMIT", raising=False)
    file = tmp_path / "moa_fairseq" / "experiments" / "records" / "provenance.py"
    file.parent.mkdir(parents=True)
    shutil.copy(PACKAGE / "experiments" / "records" / "provenance.py", file)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "records.jsonl").write_text("")
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(provenance, "_FILE", file.resolve())
    return tmp_path


def committed(copy):
    git(copy, "add", ".")
    git(copy, "commit", "-qm", "x")
    return git(copy, "rev-parse", "HEAD")


@pytest.mark.parametrize("named", [None, "0123"])
def test_the_commit_says_that_files_were_changed(copy, monkeypatch, named):
    """A copy of the files, whose git may know an older commit, is called by what is said of it."""
    head = committed(copy)
    if named:
        monkeypatch.setenv("MOA_FAIRSEQ_COMMIT", named)
    assert provenance.commit() == head
    file = provenance._FILE
    found = []
    for number in range(2):
        file.write_text(file.read_text() + f"# {number}\n")
        found.append(provenance.commit())
    if named:
        assert found == [named] * 2
    else:
        assert all(one.startswith(f"{head}-dirty-") for one in found) and len(set(found)) == 2


def test_what_a_study_records_is_no_change_of_the_source(copy):
    """Its first record would else make another commit of the second run."""
    head = committed(copy)
    (copy / "results" / "records.jsonl").write_text("a record\n")
    assert provenance.commit() == head


def test_an_installation_inside_of_another_repository_has_not_its_commit(copy, monkeypatch):
    """As in the .venv of a user's project."""
    (copy / ".gitignore").write_text("moa_fairseq\n")
    committed(copy)
    assert provenance.commit() is None
    monkeypatch.setenv("MOA_FAIRSEQ_COMMIT", "0123")
    assert provenance.commit() == "0123"


def test_a_machine_without_git_has_no_commit(copy, monkeypatch):
    committed(copy)
    monkeypatch.setenv("PATH", str(copy))
    assert provenance.commit() is None


def test_a_git_that_does_not_answer_is_no_missing_one(copy, monkeypatch):
    """Else one run of a study has a commit, and the next has none."""
    committed(copy)
    monkeypatch.setattr(provenance, "GIT_SECONDS", 0)
    with pytest.raises(UserError, match="MOA_FAIRSEQ_COMMIT"):
        provenance.commit()
    monkeypatch.setenv("MOA_FAIRSEQ_COMMIT", "0123")
    assert provenance.commit() == "0123"


def test_a_file_of_the_package_that_git_does_not_know_is_a_change(copy):
    """fairseq imports every file of plugin/models."""
    head = committed(copy)
    (copy / "notes.txt").write_text("no source\n")
    assert provenance.commit() == head
    new = copy / "moa_fairseq" / "plugin" / "models" / "mine.py"
    new.parent.mkdir(parents=True)
    found = []
    for number in range(2):
        new.write_text(f"# {number}\n")
        found.append(provenance.commit())
    assert all(one.startswith(f"{head}-dirty-") for one in found) and len(set(found)) == 2


@pytest.mark.parametrize("damage", ["index", "gitdir"])
def test_a_repository_that_git_refuses_is_no_missing_one(copy, monkeypatch, damage):
    """As that of another user, in a container: two versions of the source would both have no commit."""
    committed(copy)
    if damage == "index":
        (copy / ".git" / "index").write_text("x")
    else:
        shutil.rmtree(copy / ".git")
        (copy / ".git").write_text("gitdir: /nowhere\n")
    with pytest.raises(UserError, match="MOA_FAIRSEQ_COMMIT"):
        provenance.commit()
    monkeypatch.setenv("MOA_FAIRSEQ_COMMIT", "0123")
    assert provenance.commit() == "0123"


def test_a_repository_without_a_commit_has_none(copy):
    git(copy, "add", ".")
    assert provenance.commit() is None


def test_sessions_are_named_together():
    sessions = [
        {
            "commit": "a",
            "date": "2026-01-01",
            "versions": {"torch": "2.1", "python": "3.11"},
            "threads": 1,
        },
        {
            "commit": "b",
            "date": "2026-01-02",
            "versions": {"torch": "2.2", "python": "3.11"},
            "threads": 2,
        },
        {"commit": "a", "date": "2026-01-03", "versions": {"torch": None, "python": "3.11"}},
    ]
    assert provenance.combined(sessions) == {
        "commit": "a, b",
        "date": "2026-01-03",
        "versions": {"torch": "2.1, 2.2", "python": "3.11"},
        "threads": 2,
    }
    assert provenance.combined([]) == {}


def test_conditions_stand_beside_commit_and_versions():
    found = provenance.provenance(hardware="an abacus")
    assert (
        found["hardware"] == "an abacus"
        and found["versions"]["python"] == sys.version.split()[0]
    )


ROOT = PACKAGE.parent
MAKING = {
    "provenance",
    "versions",
    "tool_versions",
    "today",
    "strftime",
    "python_version",
    "git",
}
READING = {"made_by_of", "combined", "maker"}


def names_in(path):
    """Of the functions that a file calls, and "git" where it is a command of its."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", ""))
        elif (
            isinstance(node, ast.List)
            and node.elts
            and getattr(node.elts[0], "value", None) == "git"
        ):
            yield "git"


def roles():
    """File → what it does with the facts of a making."""
    found = {}
    for folder in ("moa_fairseq", "benchmarks", "scripts", "docs", "data-prep"):
        for path in (ROOT / folder).rglob("*.py"):
            names = set(names_in(path))
            if names & MAKING:
                found[path.relative_to(ROOT).as_posix()] = "makes"
            elif "commit" in names:
                found[path.relative_to(ROOT).as_posix()] = "compares"
            elif names & READING:
                found[path.relative_to(ROOT).as_posix()] = "reads"
    return found


def test_whatever_writes_or_reads_what_made_a_file_has_a_row_in_the_list():
    """A new place where the commit or the versions of now are asked for is looked at by somebody."""
    rows = yaml.safe_load((ROOT / "tests" / "provenance.yaml").read_text(encoding="utf-8"))
    assert {file: row["role"] for file, row in rows.items()} == roles()


def test_a_new_writer_is_noticed(tmp_path):
    """Whichever way it asks for the commit, the versions or the day."""
    for line in (
        "provenance()",
        "provenance.versions()",
        "datetime.date.today()",
        "subprocess.run(['git', 'rev-parse', 'HEAD'])",
    ):
        (tmp_path / "x.py").write_text(line)
        assert set(names_in(tmp_path / "x.py")) & MAKING, line


@pytest.mark.parametrize(
    ("variable", "value"),
    [("GIT_DIR", ".git"), ("GIT_INDEX_FILE", ".git/index"), ("GIT_WORK_TREE", "")],
)
def test_a_hook_of_git_does_not_name_another_repository(
    copy, monkeypatch, tmp_path_factory, variable, value
):
    """git gives its hooks variables of the repository in which it runs."""
    head = committed(copy)
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    monkeypatch.setenv(variable, str(other / value))
    assert provenance.commit() == head
