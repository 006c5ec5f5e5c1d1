"""What the rooms report through `logging` is printed by the command line, and by nobody twice."""

import logging

from moa_fairseq import cli

ROOM = logging.getLogger("moa_fairseq.experiments.data.somewhere")


def report(monkeypatch, capsys, *words):
    """What a verb prints that reports one line and prints one."""

    def run(args):
        ROOM.info("half %s", "done")
        logging.getLogger("moa_fairseq.layers.experts").info("not for users")
        print("result")
        return 0

    monkeypatch.setattr("moa_fairseq.experiments.corpus.command.run", run)
    root = logging.StreamHandler()  # as fairseq puts one there
    logging.getLogger().addHandler(root)
    try:
        assert cli.main(["corpus", *words]) == 0
    finally:
        logging.getLogger().removeHandler(root)
    return capsys.readouterr()


def test_reports_are_lines_of_the_standard_output(monkeypatch, capsys):
    said = report(monkeypatch, capsys)
    assert said.out == "half done\nresult\n" and said.err == ""


def test_json_has_the_standard_output_for_itself(monkeypatch, capsys):
    said = report(monkeypatch, capsys, "--json")
    assert said.out == "result\n" and said.err == "half done\n"


def test_nothing_is_left_behind(monkeypatch, capsys, caplog):
    report(monkeypatch, capsys)
    with caplog.at_level(logging.INFO):
        ROOM.info("seen by others")
    assert (
        "seen by others" in caplog.text
        and not logging.getLogger("moa_fairseq.experiments.data").handlers
    )
