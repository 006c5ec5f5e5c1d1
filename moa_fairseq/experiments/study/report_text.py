"""A study's report as text, for a terminal or as Markdown."""

from typing import Any

from moa_fairseq.experiments.scoring.against import interval_of
from moa_fairseq.experiments.study.design import Study
from moa_fairseq.experiments.study.report import Report
from moa_fairseq.experiments.tables import Column, Table, page

SYSTEM_COLUMNS = (
    Column("system", ""),
    Column("label", "system"),
    Column("n", "seeds", "d"),
    Column("loss", "bits", ".4f"),
    Column("deviation", "SD", ".4f"),
    Column("diverged", "diverged", "d"),
    Column("parameters", "parameters", ","),
    Column("cost", "attention MACs, ratio", ".2f"),
    Column("start", "initial output, ratio", ".2f"),
    Column("speed", "tokens/s, ratio", ".2f"),
)
CONTRAST_COLUMNS = (
    Column("contrast", "contrast"),
    Column("first", "system"),
    Column("second", "baseline"),
    Column("n", "seeds", "d"),
    Column("mean", "difference", "+.4f"),
    Column("interval", "95 % interval", ">"),
    Column("p_holm", "p", ".3g"),
    Column("minimum_detectable_effect", "MDE", ".4f"),
    Column("verdict", "verdict"),
)
CACHE_COLUMNS = (
    Column("system", ""),
    Column("cache_bytes", "cache, bytes", ","),
    Column("loss", "bits", ".4f"),
    Column("mean", "difference", "+.4f"),
    Column("interval", "95 % interval", ">"),
    Column("decoding", "decoding time, ratio", ">"),
    Column("pareto", "Pareto"),
)
CACHE_NOTE = (
    "Cache: bytes per token and layer, with 2 bytes per value. Differences are to the first system; their "
    "intervals are not corrected. Decoding time: seconds per token, divided by the first system's; in "
    "brackets the device and the number of texts at a time. All systems were timed in turn, in one process. "
    "Pareto: no system with as many bytes or fewer has a lower mean loss."
)
CONTRAST_NOTES = {
    "contrasts": "The system is better if the difference is negative. p is that of a two-sided paired t "
    "test after Holm's correction for all contrasts. Intervals and the minimum detectable effect (MDE) are "
    "not corrected. Equivalence means ± {margin} bits. `results/PROTOCOL.md` defines the verdicts.",
    "at_equal_training_loss": "The validation loss of a run is read at several training losses and "
    "averaged. They go from the lowest that all runs of both systems reached to one bit above it, or to "
    "the highest that all of them have. Training losses include dropout, so contrasts of unequal dropout "
    "are left out.",
}
TRANSLATION_COLUMNS = (
    Column("metric", "metric"),
    Column("contrast", "contrast"),
    Column("n", "seeds", "d"),
    Column("first", "system", ".2f"),
    Column("second", "baseline", ".2f"),
    Column("difference", "difference", "+.2f"),
    Column("interval", "95 % interval", ">"),
    Column("p_seeds_holm", "p, seeds", ".3g"),
    Column("p_holm", "p, sentences", ".3g"),
)
TRANSLATION_NOTE = (
    'The system is better if the difference is positive. The interval and "p, seeds" are those of a paired t '
    'test over seeds. "p, sentences" is that of approximate randomisation: it covers the choice of test '
    "sentences, but not chance in training. Both p are corrected for all contrasts of a metric (Holm)."
)
# Part of a report → its heading
HEADINGS = {
    "contrasts": "## Contrasts",
    "at_equal_training_loss": "## Contrasts at equal training loss",
    "cache": "## KV cache",
    "translations": "## Translations",
}


def as_text(study: Study, content: Report, markdown: bool = False) -> str:
    """The report as text with tables.

    Args:
        study: the study, with its labels and settings.
        content: the report's data, as `report` returns it.
        markdown: whether the text is Markdown, not for a terminal.
    """
    seeds = _equal_seeds(content)
    blocks = [*_introduction(study, content, seeds), _systems(content, seeds)]
    for key, note in CONTRAST_NOTES.items():
        if rows := content.get(key):
            table = _contrasts(study, rows, seeds)
            blocks += [HEADINGS[key], note.format(margin=study.margin), table]
    if rows := content.get("cache"):
        blocks += [HEADINGS["cache"], CACHE_NOTE, _caches(rows)]
    if rows := content.get("translations"):
        # One of BLEU and one of chrF
        signatures = ", ".join(dict.fromkeys(row["signature"] for row in rows))
        note = f"{TRANSLATION_NOTE} {signatures}"
        blocks += [HEADINGS["translations"], note, _translations(rows, seeds)]
    blocks += ["## Runs", _made_by(content["made_by"])]
    return page(blocks, markdown)


def _introduction(study: Study, content: Report, seeds: int | None) -> list[str | Table]:
    """The question, and what the columns of the first table mean."""
    measure = "that of the last validation"
    if study.last > 1:
        measure = f"the mean of the last {study.last} validations"
    if "unknown" in content:
        measure += f", of text with {content['unknown']:.2%} <unk>"
    seeds_text = "" if seeds is None else f", {seeds} seeds of each system"
    return [
        f"# {study.question}",
        f"{content['runs']} of {content['planned']} runs of `{study.study}`{seeds_text}. Bits are those of "
        f"the validation loss, {measure}. Ratios are to the first system; that of tokens/s is the median "
        "over seeds. Initial output: the size of attention's output before training.",
    ]


def _systems(content: Report, seeds: int | None) -> Table:
    base = content["systems"][0]
    lines = []
    for row in content["systems"]:
        cost = row["attention_macs"] / base["attention_macs"]
        start = row["branch"] / base["branch"]
        lines.append(dict(row, cost=cost, start=start, diverged=row["diverged"] or None))
    return Table(_columns(SYSTEM_COLUMNS, seeds), lines)


def _contrasts(study: Study, rows: list[dict[str, Any]], seeds: int | None) -> Table:
    lines = []
    for row in rows:
        labels = {side: study.systems[row[side]].label for side in ("first", "second")}
        lines.append(dict(row, interval=interval_of(row, 4)) | labels)
    return Table(_columns(CONTRAST_COLUMNS, seeds), lines)


def _translations(rows: list[dict[str, Any]], seeds: int | None) -> Table:
    cells = [dict(row, interval=interval_of(row)) for row in rows]
    return Table(_columns(TRANSLATION_COLUMNS, seeds), cells)


def _caches(rows: list[dict[str, Any]]) -> Table:
    lines = []
    for row in rows:
        ratios = []
        for condition, ratio in row["decoding"].items():
            ratios.append(f"{ratio:.2f} ({condition})")
        cells = {"interval": interval_of(row, 4), "decoding": "; ".join(ratios)}
        lines.append(row | cells | {"pareto": "yes" if row["is_pareto_optimal"] else ""})
    return Table(CACHE_COLUMNS, lines)


def _equal_seeds(content: Report) -> int | None:
    """The number of seeds if all rows of all tables have the same number, else None."""
    tables = [content.get(key, []) for key in ("systems", *HEADINGS)]
    numbers = {row["n"] for rows in tables for row in rows if "n" in row}
    return numbers.pop() if len(numbers) == 1 else None


def _columns(columns: tuple[Column, ...], seeds: int | None) -> list[Column]:
    """The columns of a table, without the one for the number of seeds if the introduction states it."""
    return [column for column in columns if seeds is None or column.key != "n"]


def _made_by(values: dict[str, dict[str, list[int]]]) -> str:
    """A list of commits, machines and precisions; if there are several, each with its seeds."""
    lines = []
    for key in ("commit", "hardware", "precision"):
        seeds_by_value = values[key]
        for value, seeds in seeds_by_value.items():
            line = f"- {key}: {value}"
            if len(seeds_by_value) > 1:
                line += f" (seeds {', '.join(map(str, seeds))})"
            lines.append(line)
    return "\n".join(lines)
