"""The command lines that data-prep/README.md, data-prep/*.sh and `prepare --help` print, word by word."""

import re
from pathlib import Path

import pytest

from moa_fairseq.cli import build_parser
from moa_fairseq.data_prep import command

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "data-prep").glob("*.sh") if not path.name.startswith("_"))
SCRIPT = re.compile(r"bash data-prep/(\w+)\.sh((?: \[[^\]]*\]| --?[\w-]+(?: [\w/~.]+)?| [A-Z]+)*)")
HELP = re.compile(r"^  moa-fairseq prepare (.*?)(?:  +#.*)?$", re.MULTILINE)


def lines():
    """Every documented line as words, its optional parts present, a metavariable as it stands."""
    text = (ROOT / "data-prep" / "README.md").read_text("utf-8")
    found = [(name, rest) for name, rest in SCRIPT.findall(text)]
    ((_, own),) = SCRIPT.findall((ROOT / "data-prep" / "_prepare.sh").read_text("utf-8"))
    found += [(script.stem, own) for script in SCRIPTS]
    shell = [[name, *re.sub(r"[\[\]]", "", rest).split()] for name, rest in found]
    return shell + [line.split() for line in HELP.findall(command.__doc__)]


@pytest.mark.parametrize("words", lines(), ids=" ".join)
def test_a_documented_line_is_understood(words):
    words = ["2" if word == "N" else word for word in words]
    args = build_parser(["prepare"]).parse_args(["prepare", *words])
    assert args.name == words[0]
    assert args.output == (Path("OUT") if "OUT" in words else None)
    assert args.at_hand == (Path(words[words.index("--from") + 1]) if "--from" in words else None)
    assert args.offline == ("--offline" in words) and args.workers
    command._dataset(args)


def test_there_is_a_line_with_everything_before_out():
    readme = (ROOT / "data-prep" / "README.md").read_text("utf-8")
    assert re.search(r"data-prep/wmt14_en_de\.sh \[--from DIR\] \[--offline\].* \[OUT\]", readme)
    assert any(line[1:4] == ["--from", "DIR", "--offline"] and line[-1] == "OUT" for line in lines())


@pytest.mark.parametrize("place", range(4))
def test_out_may_stand_anywhere(place):
    words = ["--from", "archives", "--offline", "--workers=3"]
    words.insert(place + (place > 0), "out")
    name_first = build_parser(["prepare"]).parse_args(["prepare", "enwik8", *words])
    assert name_first.output == Path("out") and name_first.workers == 3 and name_first.offline


def test_every_data_set_stands_in_the_readme_with_its_script():
    readme = (ROOT / "data-prep" / "README.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `data-prep/(\w+)\.sh` \|", readme, re.MULTILINE))
    assert rows == {script.stem for script in SCRIPTS}
