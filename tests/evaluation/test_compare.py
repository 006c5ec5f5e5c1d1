"""Matching runs with printed rows, the Markdown, the documents' tables, and the shipped data."""

import json

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.compare import BEGIN, END, default_results, fill
from moa_fairseq.evaluation.results import Comparison, load_comparison
from moa_fairseq.evaluation.results_markdown import render
from moa_fairseq.evaluation.skeleton import task_of

PAPER = {
    "paper": "p",
    "title": "A Paper",
    "citation": "Somebody. 2020",
    "tables": [
        {
            "table": "1",
            "caption": "Scores",
            "columns": {
                "#Params": {"quantity": "parameters", "vocab_size": 100},
                "BLEU A": {"metric": "multi_bleu", "experiments": "a_"},
                "BLEU B": {"metric": "multi_bleu", "experiments": "b_"},
            },
            "rows": [
                {
                    "row": "Ours",
                    "arch": "moa_transformer_tiny",
                    "experiments": ["a_moa", "b_moa"],
                    "values": {"#Params": 1000000, "BLEU A": 20.0, "BLEU B": 30.0},
                },
                {"row": "Theirs", "experiments": [], "values": {"BLEU A": 25.5}},
            ],
        }
    ],
}
ROW = {"paper": "p", "table": "1", "row": "Ours"}
FIRST, LAST = BEGIN.format("results"), END.format("results")


def run(experiment="a_moa", reproduces=ROW, bleu=21.25, **more):
    return {"experiment": experiment, "reproduces": reproduces, "metrics": {"multi_bleu": bleu}, **more}


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for name in ("papers", "measured"):
        (folder / name).mkdir(parents=True)
    (folder / "papers" / "p.json").write_text(json.dumps(PAPER))
    return folder


def test_a_printed_number_keeps_its_decimal(results):
    table = render(record(results, run()))
    assert "| Ours | BLEU A | 20.0 | 21.25 | +1.25 |" in table


def record(results, *runs):
    for number, measured in enumerate(runs):
        (results / "measured" / f"{measured['experiment']}_{number}.json").write_text(json.dumps(measured))
    return load_comparison(results)


def cells(comparison, row=0):
    return {cell.column: cell for cell in comparison.tables[0].rows[row].cells}


def test_without_runs_scores_are_not_run_and_counts_are_computed(results):
    comparison = record(results)
    ours = cells(comparison)
    assert (ours["BLEU A"].status, ours["BLEU A"].ours) == ("not run", None)
    assert ours["#Params"].status == "computed"
    assert ours["#Params"].difference == ours["#Params"].ours - 1000000
    assert cells(comparison, row=1)["BLEU A"].status == "no recipe"


def test_a_run_meets_its_row_and_column(results):
    ours = cells(record(results, run()))
    cell = ours["BLEU A"]
    assert (cell.ours, cell.difference, cell.status) == (21.25, 1.25, "measured")
    assert ours["BLEU B"].status == "not run"


def test_seeds_are_averaged_with_their_spread(results):
    comparison = record(results, run(bleu=20.0), run(bleu=22.0), run("b_moa", bleu=29.0))
    ours = cells(comparison)
    assert ours["BLEU A"].ours == 21.0 and ours["BLEU A"].runs == 2
    assert ours["BLEU A"].spread == pytest.approx(2**0.5)
    assert ours["BLEU B"].ours == 29.0 and ours["BLEU B"].spread is None
    assert "| Ours | BLEU A | 20.0 | 21.00 ± 1.41 (2 runs) | +1.00 |" in render(comparison)
    assert "| Ours | BLEU B | 30.0 | 29.00 | -1.00 |" in render(comparison)


def test_a_score_by_two_chains_gets_two_lines(results):
    paper = json.loads(json.dumps(PAPER))
    paper["tables"][0]["columns"]["BLEU A"]["also"] = ["moa_release_bleu"]
    paper["tables"][0]["rows"].append({**paper["tables"][0]["rows"][0], "row": "Dense", "experiments": []})
    paper["tables"][0]["rows"][2].update(experiments=["a_dense"], columns={"BLEU A": {"also": []}})
    (results / "papers" / "p.json").write_text(json.dumps(paper))
    both = run(bleu=20.0)
    both["metrics"]["moa_release_bleu"] = 20.9
    comparison = record(results, both)
    text = render(comparison)
    assert "| Ours | BLEU A (multi-bleu) | 20.0 | 20.00 | +0.00 |" in text
    assert "| Ours | BLEU A (moa-release) | 20.0 | 20.90 | +0.90 |" in text
    assert "| Ours | BLEU B | 30.0 | not run |  |" in text
    assert "| Dense | BLEU A | 20.0 | not run |  |" in text
    metrics = [cell.quantity for cell in comparison.tables[0].rows[0].cells]
    assert metrics == ["parameters", "multi_bleu", "moa_release_bleu", "multi_bleu"]
    comparison = record(results, {**both, "reproduces": None})
    head = "| Run | multi-bleu | compound-split | sacreBLEU | Valid ppl | moa-release |"
    assert head in render(comparison)


@pytest.mark.parametrize("status", ["OOM", "diverged", "running"])
def test_a_run_without_a_number_says_why(results, status):
    comparison = record(results, {**run(), "metrics": {}, "status": status})
    assert cells(comparison)["BLEU A"].status == status
    assert f"| Ours | BLEU A | 20.0 | {status} |  |" in render(comparison)


def test_runs_for_no_row_stand_apart(results):
    signature = "nrefs:1|case:mixed"
    other = run("quickstart_moa", None, 7.5, parameters=1234567, train_seconds=90, subset="test", seed=3)
    other["commit"] = "0123456789abcdef-dirty"
    other["metrics"]["sacrebleu_signature"] = signature
    comparison = record(results, other)
    assert [each["experiment"] for each in comparison.other] == ["quickstart_moa"]
    text = render(comparison)
    assert "| quickstart_moa_0 | 7.50 |  |  |  | 1.2M | 1.5 min |" in text
    assert f"- `quickstart_moa_0`: subset test, seed 3, commit 0123456789-dirty, `{signature}`" in text


def test_runs_that_differ_in_their_seed_get_a_mean_and_a_deviation(results):
    runs = [run("quickstart_moa", None, bleu, seed=seed) for seed, bleu in ((1, 7.0), (2, 8.0), (3, 9.0))]
    for each, score in zip(runs, (10.0, 20.0, 30.0)):
        each.update(headline="multi_bleu", evaluation={"accuracy_by_depth": {"2": score, "3": 5.0}})
    longer = run("quickstart_moa", None, 30.0, seed=4, headline="multi_bleu", updates=9)
    again = run("quickstart_moa", None, 7.0, seed=1, headline="multi_bleu")
    wider = run(
        "quickstart_moa", None, 40.0, seed=5, headline="multi_bleu", command="recipe --set model.arch=x"
    )
    failed = [
        run("quickstart_moa", None, 1.0, seed=seed, headline="multi_bleu", status="diverged")
        for seed in (6, 7)
    ]
    runs[0]["command"] = "recipe --save-dir runs/a --record"
    runs[1]["command"] = "recipe --set train.seed=2 --record two --save-dir b"
    runs[2]["command"] = again["command"] = longer["command"] = "recipe"
    comparison = record(results, *runs, longer, again, wider, *failed)
    text = render(comparison)
    assert "| quickstart_moa | multi-bleu | 8.00 ± 1.00 | 7.00, 8.00, 9.00 |" in text
    assert "| accuracy by depth | 2 | 3 |" in text
    assert "| quickstart_moa | 20.00 ± 10.00 | 5.00 ± 0.00 |" in text
    # not the longer, the repeated, the wider or the failed ones
    assert text.count("| quickstart_moa | multi-bleu |") == 1
    assert "Over seeds" not in render(Comparison([], [comparison.other[0], comparison.other[3]]))


def test_a_changed_run_of_a_known_experiment_does_not_stand_for_the_row(results):
    comparison = record(results, run(reproduces=None), run(reproduces={**ROW, "paper": "q"}))
    assert cells(comparison)["BLEU A"].status == "not run"
    assert len(comparison.other) == 2


def test_named_run_folders_are_shown_alone(results, tmp_path, capsys):
    record(results, run("quickstart_moa", None))
    folder = tmp_path / "runs" / "b"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(run("b_moa", bleu=31.0)))
    assert main(["compare", str(folder), "--results", str(results)]) == 0
    shown = capsys.readouterr().out
    assert "| Ours | BLEU B | 30.0 | 31.00 | +1.00 |" in shown
    assert "quickstart_moa" not in shown and "Theirs" not in shown


def test_json(results, capsys):
    record(results, run(), run("quickstart_moa", None))
    assert main(["compare", "--results", str(results), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    cell = report["tables"][0]["rows"][0]["cells"][1]
    assert {key: cell[key] for key in ("column", "paper", "ours", "difference", "status")} == {
        "column": "BLEU A",
        "paper": 20.0,
        "ours": 21.25,
        "difference": 1.25,
        "status": "measured",
    }
    assert report["other"][0]["experiment"] == "quickstart_moa"


def test_markdown_file_and_readme(results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{FIRST}\nold\n{LAST}\n\nmore\n")
    markdown = tmp_path / "out" / "table.md"
    flags = ["--results", str(results), "--markdown", str(markdown), "--update-readme", str(readme)]
    assert main(["compare", *flags]) == 0
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{FIRST}\n\n### A Paper") and text.endswith(f"{LAST}\n\nmore\n")
    assert "old" not in text
    assert markdown.read_text().strip() in text
    assert main(["compare", *flags]) == 0
    assert readme.read_text() == text


@pytest.mark.parametrize("kept", ["run/result.json", "results/papers/p.json"])
def test_markdown_does_not_overwrite_what_was_measured(kept, results, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text(json.dumps(run()))
    before = (results.parent / kept).read_text()
    flags = ["--results", str(results), "--markdown", str(results.parent / kept)]
    assert main(["compare", str(tmp_path / "run"), *flags]) == 2
    assert "--markdown" in capsys.readouterr().err and (results.parent / kept).read_text() == before


def test_a_document_has_the_parts_that_it_has_room_for(results):
    """Without a name: README.md with the headlines and results/README.md with everything."""
    for paper in (results / "papers").glob("*.json"):
        content = json.loads(paper.read_text())
        content["tables"][0]["rows"][0]["headline"] = "BLEU, a test set"
        paper.write_text(json.dumps(content))
    record(results, run(), run("quickstart_moa", None))
    short, whole = results.parent / "README.md", results / "README.md"
    short.write_text("a\n" + BEGIN.format("headlines") + "\n" + END.format("headlines") + "\nb\n")
    whole.write_text(f"{FIRST}\n{LAST}\n")
    assert main(["compare", "--results", str(results), "--update-readme"]) == 0
    assert "### A Paper" in whole.read_text() and "### A Paper" not in short.read_text()
    rows = [line for line in short.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 3 and rows[2].startswith("| Ours (")  # the runs of no row are in results/ alone
    assert "BLEU, a test set | 20.0 | 21.25 |" in rows[2] and "quickstart_moa_1" in whole.read_text()


@pytest.mark.parametrize("text", ["", FIRST, f"{LAST}\n{FIRST}", f"{FIRST}{FIRST}{LAST}"])
def test_a_readme_without_its_markers_is_left_alone(text):
    with pytest.raises(UserError, match="results:begin"):
        fill(text, {"results": "table"})


@pytest.mark.parametrize(
    "content, says",
    [("{", "not readable JSON"), ("[]", "must be a mapping"), ('{"experiment": "x"}', "lacks metrics")],
)
def test_damaged_files_are_named(results, capsys, content, says):
    (results / "measured" / "bad.json").write_text(content)
    assert main(["compare", "--results", str(results)]) == 2
    message = capsys.readouterr().err
    assert "bad.json" in message and says in message


def test_unknown_status_and_missing_folders(results, tmp_path, capsys):
    with pytest.raises(UserError, match="status 'fine'"):
        record(results, {**run(), "status": "fine"})
    assert main(["compare", "--results", str(tmp_path / "none")]) == 2
    assert main(["compare", str(tmp_path / "no-run"), "--results", str(results)]) == 2
    assert "result.json" in capsys.readouterr().err


# --- the data that ships ------------------------------------------------------------------------

SHIPPED = sorted((default_results() / "papers").glob("*.json"))
ROWS = [
    ({**table, "paper": path.stem}, row)
    for path in SHIPPED
    for table in json.loads(path.read_text(encoding="utf-8"))["tables"]
    for row in table["rows"]
]


def printed_numbers(row):
    scale = {"K": 1e3, "M": 1e6, "G": 1e9}
    for field in row["printed"].split(" | "):
        if field != "-":
            yield float(field.rstrip("KMG")) * scale.get(field[-1], 1)


def test_every_table_is_there():
    rows = {f"{table['paper']} {table['table']}": len(table["rows"]) for table, _ in ROWS}
    moa = {"moa 1": 13, "moa 2": 6, "moa 3": 8, "moa 7": 3}
    mae = {"mae 2": 8, "mae 3": 6, "mae 4": 5, "mae 5": 6, "mae 7": 5}
    switchhead = {"switchhead 1": 12, "switchhead 2": 21, "switchhead 3": 12, "switchhead 7": 10}
    moh = {"moh 1": 6, "moh 2": 15, "moh 3": 9, "moh 4": 2, "moh 5": 3}
    assert rows == {**moa, **mae, **switchhead, **moh, "revisit_mmt README-baseline": 1}


@pytest.mark.parametrize("table, row", ROWS, ids=lambda part: part.get("row") or part["table"])
def test_values_are_the_printed_row(table, row):
    printed = list(printed_numbers(row))
    values = [*row.get("setting", {}).values(), *row["values"].values()]
    assert values == pytest.approx(printed)
    assert set(row["values"]) <= set(table["columns"])


def test_architectures_of_the_rows_exist():
    archs = {row["arch"] for _, row in ROWS if "arch" in row}
    assert len(archs) == 38
    tasks = {arch: task_of(arch) for arch in archs}
    assert {arch for arch, task in tasks.items() if task == "masked_lm"} == {
        a for a in archs if "roberta" in a
    }
    assert {arch for arch, task in tasks.items() if task == "language_modeling"} == {
        arch for arch in archs if "_lm_" in arch
    }
    assert set(tasks.values()) == {"translation", "masked_lm", "language_modeling"}


def test_experiments_of_the_rows_have_recipes():
    configs = default_results().parent / "configs"
    experiments = {name for _, row in ROWS for name in row["experiments"]}
    assert len(experiments) == 57
    assert not [name for name in sorted(experiments) if not (configs / f"{name}.yaml").is_file()]


def test_computed_numbers_agree_with_the_printed_ones():
    comparison = load_comparison(default_results())
    tables = {table.table: table for table in comparison.tables if table.paper == "moa"}
    computed = [
        cell
        for number in ("1", "3")
        for row in tables[number].rows
        for cell in row.cells
        if cell.status == "computed" and "Vaswani" not in row.row  # printed by others, of other vocabularies
    ]
    assert len(computed) == 2 * 3 + 8 * 2
    for cell in computed:
        if cell.quantity == "parameters":
            assert abs(cell.difference) < 1e6
        else:
            assert cell.ours == pytest.approx(cell.paper, rel=3e-3)


def test_table_2_has_both_conventions_beside_the_plain_count():
    (table,) = (t for t in load_comparison(default_results()).tables if (t.paper, t.table) == ("moa", "2"))
    cells = [{cell.column: cell for cell in row.cells} for row in table.rows]
    # to 0.01M; the paper prints 52.45 for 52.444
    assert all(abs(row["#Params"].difference) < 0.0101e6 for row in cells)
    assert [row["MACs"].ours / row["MACs"].paper for row in cells] == pytest.approx([1] * 6, abs=7e-3)
    assert [row["MACs"].quantity for row in cells] == ["macs_paper_convention"] + ["macs_attention_twice"] * 5
    assert all(row["MACs"].plain not in (None, row["MACs"].ours) for row in cells)
    text = render(load_comparison(default_results()))
    assert (
        "| `moa_roberta_8k64e256d` | 179.91M | 179.91M | +0.0 % | 8980M |" in text and "plain count" in text
    )


def test_moas_bleu_is_compared_by_both_chains():
    text = render(load_comparison(default_results()))
    for column, paper in (("WMT14 EnDe BLEU", "28.4"), ("WMT14 EnFr BLEU", "42.5")):
        for chain in ("multi-bleu", "moa-release"):
            assert f"| MoA Base (8K8E128D) | {column} ({chain}) | {paper} | " in text
    assert "| Big 16K32E256D | BLEU(Test) (moa-release) | 29.4 | " in text
    assert "| Transformer base (Vaswani et al., 2017) | WMT14 EnDe BLEU | 27.3 | " in text


def test_maes_parameters_are_counted_with_the_rows_own_flags():
    tables = {t.table: t for t in load_comparison(default_results()).tables if t.paper == "mae"}
    for number, tolerance in (("2", 0.5e6), ("3", 1.1e6), ("4", 2.3e6)):
        cells = [c for row in tables[number].rows for c in row.cells if c.status == "computed"]
        assert len(cells) >= 4 and all(abs(cell.difference) < tolerance for cell in cells)
    ours = {row.row: row.cells[1].ours for row in tables["2"].rows}
    assert ours["UNI-MAE-7"] == ours["UNI-MAE-6"] == ours["BASE"] < ours["MAE-7"] < ours["MAE-6"]


def test_switchheads_costs_are_the_printed_ones_but_for_two():
    """Within 1 % or the last printed digit, with a plain count beside; the two are explained in a note."""
    tables = [t for t in load_comparison(default_results()).tables if t.paper == "switchhead"]
    far = set()
    for table in tables:
        for row in table.rows:
            printed = row_of(table.table, row.row)["printed"].split(" | ")
            cells = {cell.column: cell for cell in row.cells}
            for column, text in zip(("#Params", "MACs", "Mem (floats)"), (printed[0], *printed[2:])):
                digit = 10.0 ** -len(text[:-1].partition(".")[2]) * {"M": 1e6, "G": 1e9}[text[-1]]
                if abs(cells[column].difference) > max(0.01 * cells[column].paper, 1.001 * digit):
                    far.add((row.row, column))
            assert cells["MACs"].plain > 0.5 * cells["MACs"].ours
    rope = {f"{data} 244M SwitchHead, 4 heads" for data in ("WikiText-103", "C4")}
    assert far == {(row, column) for row in rope for column in ("MACs", "Mem (floats)")}
    (note,) = [note for table in tables for note in table.notes if "4.2G and 18.4M" in note]
    assert "carried chunk" in note


def row_of(table, name):
    return next(
        row
        for about, row in ROWS
        if (about["paper"], about["table"], row["row"]) == ("switchhead", table, name)
    )
