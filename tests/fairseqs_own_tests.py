"""fairseq's own tests, without the plugin and with it: which fail with it alone?

    python tests/fairseqs_own_tests.py FOLDER [arguments of pytest]

FOLDER: `tests/` of fairseq's source, of the version in use; nothing is downloaded. The further arguments go
to pytest, such as -k "not test_binaries" or -n 2. The status is 1 if a test fails with the plugin alone,
unless it is one of MEANT.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

# what the plugin changes on purpose: {end of a test's name: why}
MEANT = {
    "TestCheckpointUtils.test_torch_persistent_save_async": "checkpoints are not written asynchronously",
}
# fairseq's commands come first: what is changed in them is changed in modules that are loaded
PLUGIN = """
import importlib
for name in ("train", "generate", "interactive", "validate", "eval_lm", "preprocess", "score"):
    importlib.import_module(f"fairseq_cli.{name}")
import moa_fairseq
moa_fairseq.register()
"""


def outcomes(folder, words, with_plugin):
    """{test: "passed", "failed" or "skipped"}; an error while one is collected is a failure, too."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        (Path(place) / "with_the_plugin.py").write_text(PLUGIN)
        paths = [place, str(folder.parent), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        command += ["--continue-on-collection-errors"]
        command += ["-p", "with_the_plugin"] if with_plugin else []
        command += [
            "--import-mode=importlib",
            f"--rootdir={folder.parent}",
            f"--junitxml={report}",
            *words,
        ]
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Fairseq's checkpoints need it since torch 2.6; no failure may hide another
        if not with_plugin:
            settings["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        subprocess.run(
            [*command, str(folder)],
            cwd=place,
            env={**os.environ, **settings},
            stdout=sys.stderr,
            check=False,
        )
        cases = ElementTree.parse(report).getroot().iter("testcase")
        kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        return {
            f"{case.get('classname')}.{case.get('name')}": next(
                (kinds[part.tag] for part in case if part.tag in kinds), "passed"
            )
            for case in cases
        }


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    args, words = parser.parse_known_args(arguments)
    without, plugin = (outcomes(args.folder.resolve(), words, each) for each in (False, True))
    for title, found in (("without the plugin", without), ("with the plugin", plugin)):
        counts = {
            kind: list(found.values()).count(kind) for kind in ("passed", "failed", "skipped")
        }
        print(f"{title}: {', '.join(f'{number} {kind}' for kind, number in counts.items())}")
    if "passed" not in without.values():
        parser.error(
            f"no test of {args.folder} passes without the plugin: name the tests/ of fairseq's source"
        )
    status = 0
    for name in sorted(
        name for name in plugin if plugin[name] == "failed" != without.get(name)
    ):
        reason = next((why for end, why in MEANT.items() if name.endswith(end)), None)
        print(
            f"fails with the plugin alone: {name}" + (f" (meant: {reason})" if reason else "")
        )
        status = status if reason else 1
    for name in sorted(
        name for name in plugin if without.get(name) == "failed" != plugin[name]
    ):
        print(f"fails without the plugin alone: {name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
