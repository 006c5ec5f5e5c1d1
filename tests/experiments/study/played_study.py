"""A toy study whose trainings are simulated, and helpers that read and change its records."""

import json
from pathlib import Path
from typing import ClassVar

from moa_fairseq.errors import Diverged
from moa_fairseq.experiments.data.prepare import content_digest
from moa_fairseq.experiments.make import write_step_record
from moa_fairseq.experiments.recipes.hardware import detect_hardware
from moa_fairseq.experiments.records import provenance
from moa_fairseq.experiments.study.records import append_record, records_of

RECIPE = """
experiment: tiny
summary: a language model that is never trained
data: {recipe: wikitext2_sp4k}
model: {arch: dense_transformer_lm_base, flags: {decoder-layers: 1, decoder-embed-dim: 64,
  decoder-input-dim: 64, decoder-output-dim: 64, decoder-ffn-embed-dim: 64, decoder-attention-heads: 4}}
train: {task: language_modeling, criterion: cross_entropy, max_tokens: 16, max_update: 4, precision: fp32}
"""
STUDY = {
    "study": "toy",
    "question": "Is B better than A?",
    "seeds": 4,
    "last": 2,
    "systems": {
        "A": {"label": "dense", "recipe": "../tiny.yaml"},
        "B": {"label": "mixture", "recipe": "../tiny.yaml"},
    },
    "contrasts": {"gain": {"first": "B", "second": "A", "question": "?"}},
}
COMMIT = "0123abc" * 5 + "01234"
OTHER = "fedcba9876" * 4


def say_what_trains(folder):
    """Write the step records that a recipe leaves in its run folder."""
    conditions = {"hardware": detect_hardware().describe(), "threads": 1, "precision": "fp32"}
    if Player.data:
        conditions["data"] = content_digest(Player.data)
        write_step_record(folder, "prepare", inputs={}, facts={"folder": str(Player.data)})
    conditions |= Player.conditions
    write_step_record(
        folder, "train", inputs={}, facts={}, made_by=[provenance.provenance(**conditions)]
    )


class Player:
    """Stands for the executor: writes what a training would have logged.

    After `end` runs it raises KeyboardInterrupt. `conditions` replace those of this machine in the
    provenance.
    """

    ran: ClassVar[list] = []
    end = None
    diverges = ()
    data = None
    conditions: ClassVar[dict] = {}

    def __init__(self, environment):
        assert environment == {"OMP_NUM_THREADS": "1"}

    def run(self, command, log):
        folder = Path(command[command.index("--save-dir") + 1])
        settings = dict(text.partition("=")[::2] for text in command if "=" in text)
        if Player.end is not None and len(Player.ran) >= Player.end:
            raise KeyboardInterrupt
        Player.ran.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        say_what_trains(folder)
        if folder.name in Player.diverges:
            raise Diverged("fairseq-train failed")
        rate = float(settings.get("train.flags.lr", 1))
        loss = (
            3
            - 0.5 * folder.name.startswith("B")
            + 0.01 * int(settings["train.seed"]) ** 2
            + (rate - 2) ** 2
        )
        rows = [{"epoch": 1, "num_updates": str(n), "loss": "9"} for n in (1, 2)]
        rows += [
            {"epoch": 1, "valid_loss": str(loss + 4 - n), "valid_num_updates": str(n)}
            for n in (2, 3, 4)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def record_of(folder, name):
    """The record of a run, such as B-seed2."""
    return {
        f"{system}-seed{seed}".replace(" ", "-"): each.content
        for (system, seed), each in records_of(folder).items()
    }[name]


def keep(folder, records):
    """Replace a study's records by these."""
    lines = (json.dumps(content) + "\n" for content in records)
    (folder / "records.jsonl").write_text("".join(lines))


def changed(folder, name, **values):
    """Append a record of a run with other values; of several records of one run, the last one counts."""
    append_record(folder, {**record_of(folder, name), **values})


def without(folder, name):
    """Remove a run's record."""
    gone = record_of(folder, name)
    keep(folder, [each.content for each in records_of(folder).values() if each.content != gone])


def report_of(study, **changes):
    status, records = study("--report", **changes)
    assert status == 0
    return json.loads((records / "report.json").read_text())


def of_system(name, **values):
    """A system's row in a report."""
    row = {"system": name, "label": name, "family": "", "n": 4, "loss": 3.0, "deviation": 0.2}
    row.update(diverged=0, parameters=7, attention_macs=2, branch=1.0, speed=1.0)
    return row | values
