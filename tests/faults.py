"""Plants the faults of faults.yaml, one at a time, in a copy of this tree, and asks the tests about each.

python tests/faults.py layers plugin.patches   two rooms
python tests/faults.py attention-07 --record   one fault; what caught it is kept in faults.yaml
python tests/faults.py --sample 10             ten of them, the same ones all day

A fault is caught where a test fails that passes without it; else it survives. A test that takes too long is
no verdict. Tests run in processes forked from one that has imported torch and fairseq already.
"""

import argparse
import datetime
import hashlib
import importlib
import importlib.util
import itertools
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "faults.yaml"
# Tests that pass without any fault, by the tree's checksum
MEMORY = ROOT / ".pytest_cache" / "faults.json"
CAUGHT = "caught"
SURVIVES = "survives"
NO_VERDICT = "no verdict"
MISSING = "does not apply"
_PRELOADED = (
    *(
        "torch._dynamo",
        "torch.utils.checkpoint",
        "fairseq.trainer",
        "fairseq_cli.preprocess",
        "fairseq.tasks",
    ),
    *(
        "hydra",
        "sacrebleu",
        "sacremoses",
        "sentencepiece",
        "scipy.stats",
        "matplotlib.figure",
        "requests",
    ),
    *("polib", "subword_nmt.learn_bpe", "omegaconf", "portalocker", "regex", "tqdm", "pytest"),
)
_NO_TEST = (4, 5)  # pytest's exit status where it finds no test


def load():
    """The faults: id, room, file, old, new, what, tests; caught: the test that catches it; of a survivor
    witness or reason."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


class _Text(yaml.SafeDumper):
    """Writes lines of code as they are."""

    def ignore_aliases(self, data):
        return True


def _represent(dumper, text):
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Text.add_representer(str, _represent)


def save(faults):
    """Rewrite faults.yaml."""
    entries = [
        yaml.dump([fault], Dumper=_Text, sort_keys=False, allow_unicode=True, width=1000)
        for fault in faults
    ]
    FILE.write_text("\n".join(entries), encoding="utf-8")


def problem(fault, root=ROOT):
    """Why a fault cannot be planted, or ""."""
    path = root / fault["file"]
    if not path.is_file():
        return f"there is no {fault['file']}"
    count = path.read_text(encoding="utf-8").count(fault["old"])
    return "" if count == 1 else f"its old text stands {count} times in {fault['file']}"


class Copy:
    """A copy of the tree in which tests run."""

    def __init__(self, folder):
        self.folder = Path(folder) / "tree"
        listed = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
        names = (
            subprocess.run(listed, check=True, capture_output=True).stdout.decode().split("\0")
        )
        digest = hashlib.sha256()
        for name in sorted(filter(None, names)):
            source = ROOT / name
            target = self.folder / name
            if not os.path.lexists(source):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
            if source.is_file() and source != FILE:
                digest.update(name.encode() + b"\0" + source.read_bytes())
        self.checksum = digest.hexdigest()
        self.environment = {
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a stale .pyc would hide a fault
            "OMP_NUM_THREADS": "1",
        }

    def ask(self, words, timeout):
        """Run pytest with these words; returns (its status or None for no answer in time, failed tests).

        Words such as NAME=VALUE before the others are of the environment.
        """
        answer = self.folder.parent / "answer.json"
        answer.unlink(missing_ok=True)
        child = multiprocessing.get_context("fork").Process(
            target=self._test, args=(words, answer)
        )
        child.start()
        child.join(timeout)
        if child.exitcode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.join()
            return None, []
        found = (
            json.loads(answer.read_text())
            if answer.is_file()
            else {"status": 1, "failed": ["a crash"]}
        )
        return found["status"], found["failed"]

    def _test(self, words, answer):
        os.setsid()
        log = os.open(self.folder.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(log, number)
        settings = list(
            itertools.takewhile(lambda word: re.fullmatch(r"[A-Z_]+=\S+", word), words)
        )
        os.environ.update({**self.environment, **dict(word.split("=", 1) for word in settings)})
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if re.match(r"triton(?!\._C)\b", name)]:
            # Torch loads it; it looks at its environment once. Its C part loads once.
            del sys.modules[name]
        os.chdir(self.folder)
        tests = str(Path(__file__).parent)
        sys.path[:] = [
            str(self.folder),
            *(path for path in sys.path if path not in (tests, str(ROOT), "")),
        ]
        sys.argv = ["pytest"]
        importlib.invalidate_caches()
        origin = importlib.util.find_spec("moa_fairseq").origin
        assert origin.startswith(str(self.folder)), origin
        _inherit_the_server()
        import pytest

        failed = []

        class Listener:
            def pytest_runtest_logreport(self, report):
                failed.extend([report.nodeid] * report.failed)

            def pytest_collectreport(self, report):
                failed.extend([report.nodeid] * report.failed)

        scratch = self.folder.parent / "tmp"
        shutil.rmtree(scratch, ignore_errors=True)
        options = ["--all", "-x", "-q", "-p", "no:cacheprovider", f"--basetemp={scratch}"]
        status = int(pytest.main([*options, *words[len(settings) :]], plugins=[Listener()]))
        answer.write_text(json.dumps({"status": status, "failed": failed}))
        os._exit(0)  # threads of a test that failed may not end


def _inherit_the_server():
    """Tests of commands have a server that forks them: let all of them share the one that runs already."""
    from multiprocessing import forkserver

    # A child cannot wait for its parent's child
    if forkserver._forkserver._forkserver_pid is not None:
        forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None


def words_of(target):
    """Files and folders, or a test, whose name may hold blanks; settings of the environment before them."""
    settings = re.match(r"(?:[A-Z_]+=\S+ )*", target)[0]
    rest = target[len(settings) :]
    return [*settings.split(), *([rest] if "::" in rest else rest.split())]


def verdict(fault, copy, timeout, confirms, most=None):
    """(one of CAUGHT, SURVIVES, NO_VERDICT, MISSING; what caught it, or why there is no verdict)

    most: so many of its tests are asked.
    """
    if found := problem(fault, copy.folder):
        return MISSING, found
    for package, part in (("transformers", "integrations"), ("lm_eval", "zero_shot")):
        is_asked = any(part in target for target in fault["tests"])
        if is_asked and importlib.util.find_spec(package) is None:
            option = part.replace("_", "-")
            return (
                NO_VERDICT,
                f"its tests run where {package} is (bash scripts/setup.sh --{option})",
            )
    path = copy.folder / fault["file"]
    before = path.read_text(encoding="utf-8")
    targets = list(
        dict.fromkeys([*filter(None, [fault.get("caught")]), *fault["tests"][:most]])
    )
    for target in targets:
        path.write_text(before.replace(fault["old"], fault["new"]), encoding="utf-8")
        try:
            status, failed = copy.ask(words_of(target), timeout)
        finally:
            path.write_text(before, encoding="utf-8")
        if status is None:
            return NO_VERDICT, f"{target} took more than {timeout} s"
        if status in _NO_TEST and not failed:
            if target == fault.get("caught"):
                continue  # renamed since
            return NO_VERDICT, f"{target} has no test"
        if status:
            settings = [word for word in target.split() if "=" in word and "::" not in word]
            name = " ".join([*settings, failed[0]]) if failed and "::" in failed[0] else target
            if confirms and not _passes(copy, name, timeout):
                return NO_VERDICT, f"{name} fails without the fault, too"
            return CAUGHT, name
    return SURVIVES, " ".join(targets)


def _passes(copy, test, timeout):
    """Whether a test passes without a fault; remembered."""
    known = json.loads(MEMORY.read_text()) if MEMORY.is_file() else {}
    passed = known.get(copy.checksum, [])
    if test not in passed:
        status, _ = copy.ask(words_of(test), timeout)
        if status != 0:
            return False
        MEMORY.parent.mkdir(exist_ok=True)
        MEMORY.write_text(json.dumps({copy.checksum: [*passed, test]}))
    return True


def chosen(faults, names, sample, date):
    """Those of the rooms or ids named, all without a name; of them a sample that follows from the date."""
    known = {name for fault in faults for name in (fault["id"], fault["room"])}
    if unknown := set(names) - known:
        raise SystemExit(f"no room or fault is called {', '.join(sorted(unknown))}")
    found = faults
    if names:
        found = [
            fault for name in names for fault in faults if name in (fault["id"], fault["room"])
        ]
    return random.Random(date).sample(found, min(sample, len(found))) if sample else found


def main(words=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="ROOM|ID", help="which faults (all)")
    add("--sample", type=int, metavar="N", help="N of them, chosen by the date")
    add(
        "--date",
        default=datetime.date.today().isoformat(),
        metavar="YYYY-MM-DD",
        help="of --sample (today)",
    )
    add(
        "--no-baseline",
        action="store_true",
        help="believe a catch without asking the test without the fault",
    )
    add("--unasked", action="store_true", help="of these, those that have no verdict yet")
    add("--first", action="store_true", help="ask the first of a fault's tests alone")
    add(
        "--caught", action="store_true", help="ask the test alone that is said to catch a fault"
    )
    add(
        "--timeout",
        type=int,
        default=600,
        metavar="S",
        help="seconds a test file or folder may take (600)",
    )
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="faults at a time, each in a copy of its own (1)",
    )
    add("--record", action="store_true", help="keep in faults.yaml what caught a fault")
    add("--json", type=Path, metavar="FILE", help="write the verdicts")
    args = parser.parse_args(words)
    known = [
        fault for fault in load() if not (args.unasked and fault.keys() & {"caught", "reason"})
    ]
    faults = chosen(known, args.names, args.sample, args.date)
    verdicts = {}
    if args.jobs > 1:
        return _share(faults, args)
    _preload()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(folder)
        for fault in faults:
            began = time.monotonic()
            most = 0 if args.caught else 1 if args.first else None
            kind, why = verdict(fault, copy, args.timeout, not args.no_baseline, most)
            seconds = round(time.monotonic() - began, 1)
            verdicts[fault["id"]] = {"verdict": kind, "why": why, "seconds": seconds}
            print(f"{fault['id']}: {kind}, {seconds} s: {why}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
            if args.record and kind == CAUGHT:
                entries = load()
                (entry,) = (one for one in entries if one["id"] == fault["id"])
                entry["caught"] = why
                save(entries)
    return _sum_up(verdicts, faults)


def _sum_up(verdicts, faults):
    """Print what survives; the status is 0 where that is known, and nothing is without a verdict."""
    kinds = [found["verdict"] for found in verdicts.values()]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    expected = {fault["id"] for fault in faults if fault.get("reason")}
    new = [
        name
        for name, found in verdicts.items()
        if found["verdict"] != CAUGHT and name not in expected
    ]
    for name in new:
        print(f"not caught: {name}")
    return int(bool(new))


def _share(faults, args):
    """Run `args.jobs` of this program side by side."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        files = [Path(folder) / f"{number}.json" for number in range(args.jobs)]
        workers = []
        for number, file in enumerate(files):
            own = [fault["id"] for fault in faults[number :: args.jobs]]
            words = [
                sys.executable,
                __file__,
                *own,
                "--json",
                str(file),
                "--timeout",
                str(args.timeout),
            ]
            words += ["--no-baseline"] * args.no_baseline + ["--first"] * args.first
            words += ["--caught"] * args.caught
            workers += [subprocess.Popen(words)] if own else []
        for worker in workers:
            worker.wait()
        verdicts = {}
        for file in files:
            verdicts.update(json.loads(file.read_text()) if file.is_file() else {})
    if args.json:
        args.json.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    return _sum_up(verdicts, faults)


def _preload():
    """Import what the tests need, and start the server that forks commands."""
    for name in _PRELOADED:
        importlib.import_module(name)
    logging.getLogger().handlers.clear()  # as it is where nothing is imported yet
    logging.getLogger().setLevel(logging.WARNING)
    sys.path.insert(0, str(ROOT / "tests"))
    from commands import start_the_server

    start_the_server()
    del sys.modules["commands"]  # the copy has its own


if __name__ == "__main__":
    sys.exit(main())
