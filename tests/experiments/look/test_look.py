"""What a page shows equals what the layers compute and what `analyze` finds; hostile text stays text."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml

from moa_fairseq.cli import main
from moa_fairseq.experiments.analysis.attention_maps import measure_attention
from moa_fairseq.experiments.analysis.learning_curve import Point
from moa_fairseq.experiments.look import routes, samples, trained_run
from moa_fairseq.experiments.scoring.trained_model import load_trained
from moa_fairseq.layers.mae import MixtureOfAttentiveExperts
from moa_fairseq.plugin.forward_context import collect_routings


def router_of(page, name, run=0):
    """(its place, the router)."""
    return next(
        (at, each)
        for at, each in enumerate(page["runs"][run]["routers"])
        if each["name"] == name
    )


def rows(numbers, width):
    return torch.tensor(numbers).view(-1, width)


def forced(checkpoint, data, sentence):
    """The model, its input, the routings and log2 p of a sentence of the page, computed anew."""
    model, task = load_trained(checkpoint, data)
    model.eval()
    source, previous = (
        torch.tensor([[task.source_dictionary.index(text) for text in sentence[side]]])
        for side in ("source", "target")
    )
    with torch.no_grad(), collect_routings() as routings:
        output = model(source, torch.tensor([source.size(1)]), previous)
    log_probs = model.get_normalized_probs(output, log_probs=True)[0] / math.log(2)
    return model, task, previous, dict(routings), log_probs


def test_experts_weights_and_surprise_are_the_layers_own(whole, moa_run, toy_data):
    assert whole["runs"][0]["kind"] == "translation" and len(whole["sentences"]) == 12
    names = [router["name"] for router in whole["runs"][0]["routers"]]
    assert names == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.encoder_attn",
    ]
    for (sentence,) in whole["sentences"]:
        _, _, previous, routings, log_probs = forced(
            moa_run / "checkpoint_best.pt", toy_data, sentence
        )
        for at, name in enumerate(names):
            _, router = router_of(whole, name)
            gates, order = routings[name].gates.sort(dim=1, descending=True, stable=True)
            route = sentence["routes"][at]
            assert rows(route["e"], router["per_token"]).equal(
                routings[name].expert_ids.gather(1, order)
            )
            torch.testing.assert_close(
                rows(route["g"], router["per_token"]) / 1000, gates.detach(), atol=6e-4, rtol=0
            )
        surprise = -log_probs[:-1].gather(1, previous[0, 1:, None])[:, 0]
        assert sentence["bits"][0] is None
        torch.testing.assert_close(
            torch.tensor(sentence["bits"][1:]), surprise, atol=6e-3, rtol=1e-4
        )
        assert 0 <= sentence["score"] <= 100 and sentence["reference"].split()[0].startswith(
            "w"
        )


def test_strongest_keys_are_those_of_the_attention_maps(look, moa_run, toy_data):
    """In the encoder, whose input does not depend on the translation."""
    page = look(moa_run, "--data", toy_data, "--sentences", 2)
    model, task = load_trained(moa_run / "checkpoint_best.pt", toy_data)
    at, router = router_of(page, "encoder.layers.0.self_attn")
    for number, (sentence,) in enumerate(page["sentences"]):
        found = measure_attention(model, task, "test", number, torch.device("cpu"))[0]
        assert found.queries == sentence["source"]
        experts = rows(sentence["routes"][at]["e"], router["per_token"])
        keys = torch.tensor(sentence["routes"][at]["k"]).view(
            len(found.queries), router["per_token"], 3, 2
        )
        slots = {}  # of each token: expert → slot
        with torch.no_grad(), collect_routings() as routings:
            model(**task.dataset("test").collater([task.dataset("test")[number]])["net_input"])
        for token, chosen in enumerate(routings[0][1].expert_ids.tolist()):
            slots[token] = {expert: slot for slot, expert in enumerate(chosen)}
        for token in range(len(found.queries)):
            for place, expert in enumerate(experts[token].tolist()):
                weights, places = found.weights[slots[token][expert], token].topk(
                    min(3, len(found.queries))
                )
                shown = keys[token, place][: len(places)]
                assert (shown[:, 1] - 1000 * weights).abs().max() <= 0.51
                assert (
                    shown[:, 0].tolist() == places.tolist()
                    or len(set(shown[:, 1].tolist())) < 3
                )


def test_a_strongest_key_stands_in_the_text_that_the_attention_reads(whole):
    routers = whole["runs"][0]["routers"]
    lengths = set()
    for (sentence,) in whole["sentences"]:
        for router, route in zip(routers, sentence["routes"]):
            positions = route["k"][::2]
            assert 0 <= min(positions) <= max(positions) < len(sentence[router["to"]])
            lengths.add(len(sentence["source"]) > len(sentence["target"]))
    assert True in lengths  # then positions counted from the end would be negative or too large


def test_loads_and_typical_tokens_are_those_of_analyze(whole, moa_run, toy_data, tmp_path):
    checkpoint = moa_run / "checkpoint_best.pt"
    common = f"{checkpoint} --data {toy_data} --cpu --json {tmp_path}/found.json"

    def analyze(kind, words):
        assert main(f"analyze {kind} {common} {words}".split()) == 0
        return json.loads((tmp_path / "found.json").read_text())

    loads = analyze("expert-load", f"--output {tmp_path}/load.png")["modules"]
    assert len(loads) == 3
    for load in loads:
        _, router = router_of(whole, load["name"])
        assert router["load"] == load
        typical = analyze("expert-tokens", f"--module {load['name']}")["tokens"]
        assert router["typical"] == [
            [[token["token"], round(token["pmi"], 2), token["count"]] for token in tokens]
            for tokens in typical
        ]


FAMILIES = {
    "mae": ("mae_transformer_tiny",),
    "mae6": ("mae_transformer_tiny", "--mae-dropped-heads", 2),
    "uniform": ("mae_transformer_tiny", "--mae-gate", "uniform"),
    "switchhead": ("switchhead_transformer_tiny", "--num-experts", 3, "--experts-per-token", 2),
    "moh": ("moh_transformer_tiny",),
    "gqe": ("gqe_transformer_tiny",),
    "namoh": ("namoh_transformer_tiny",),
    "dense": ("dense_transformer_tiny",),
}


@pytest.mark.thorough(keep="[mae]")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_page(look, save_model, toy_data, tmp_path, family):
    arch, *flags = FAMILIES[family]
    save_model(toy_data, tmp_path / "run" / "checkpoint_best.pt", *flags, arch=arch)
    page = look(tmp_path / "run", "--data", toy_data, "--sentences", 1)
    sentence = page["sentences"][0][0]
    model, _, _, routings, _ = forced(
        tmp_path / "run" / "checkpoint_best.pt", toy_data, sentence
    )
    routed = {router["name"] for router in page["runs"][0]["routers"] if router["experts"]}
    assert routed == routings.keys()
    for router, route in zip(page["runs"][0]["routers"], sentence["routes"]):
        tokens = len(sentence[router["on"]])
        if router["experts"]:
            routing = routings[router["name"]]
            expected = routing.gates.sort(dim=1, descending=True, stable=True)
            assert rows(route["e"], router["per_token"]).equal(
                routing.expert_ids.gather(1, expected.indices)
            )
            assert sum(router["load"]["load"]) == pytest.approx(1)
        if router["to"]:
            keys = torch.tensor(route["k"]).view(tokens, -1, 3, 2)
            heads = router["per_token"] if router["experts"] else keys.size(1)
            assert keys.size(1) == heads and (keys[..., 1].sum(-1) <= 1002).all()
            assert (keys[..., 0] >= 0).all() and (
                keys[..., 0] < len(sentence[router["to"]])
            ).all()
    if family == "mae":  # of an expert that lacks head i: the mean of the other heads
        attention = model.encoder.layers[0].self_attn
        assert isinstance(attention, MixtureOfAttentiveExperts)
        assert attention.heads_of_experts().equal(1 - torch.eye(8))


def test_text_of_others_stays_text(look, moa_run, toy_data, tmp_path):
    hostile = [
        "</script><script>alert(1)</script>",
        "w1 \u202eevil\u202c &lt;b&gt; w2",
        "w3 \u2028<!-- w4",
    ]
    (tmp_path / "lines").write_text("\n".join(hostile) + "\n\n", encoding="utf-8")
    run = tmp_path / "run<img src=x>"
    shutil.copytree(moa_run, run)
    (run / "recipe.yaml").write_text(
        yaml.safe_dump(
            {"experiment": "x", "summary": "</style>\u202e", "model": {"arch": "</script>"}}
        )
    )
    (tmp_path / "lines.de").write_text("")
    page = look(run, "--data", toy_data, "--input", tmp_path / "lines")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and text.count("<script") == 2
    assert text.count("</style>") == 1 and "<img" not in text and "\u2028" not in text
    assert [sentence["number"] for (sentence,) in page["sentences"]] == [1, 2, 3]
    assert all("reference" not in sentence for (sentence,) in page["sentences"])
    assert page["runs"][0]["name"] == run.name


def test_a_page_is_cut_to_its_size_and_says_so(look, whole, moa_run, toy_data, monkeypatch):
    monkeypatch.setattr(trained_run, "LIMITS", (3_000, 6_000, 9_000))
    page = look(moa_run, "--data", toy_data)
    notes = " ".join(page["runs"][0]["notes"])
    detail = [
        0 if each["routes"] is None else 1 + any("k" in route for route in each["routes"])
        for (each,) in page["sentences"]
    ]
    assert detail == sorted(detail, reverse=True) and set(detail) == {0, 1, 2}
    assert f"{detail.count(2):,} sentences have strongest keys" in notes
    assert f"{len(detail) - detail.count(0):,} sentences have experts" in notes
    assert f"{len(detail)} of 12" in notes or len(detail) == 12
    assert [each["target"] for (each,) in page["sentences"]] == [
        each["target"] for (each,) in whole["sentences"][: len(detail)]
    ]


def test_sentences_of_several_batches_keep_their_numbers(
    look, whole, moa_run, toy_data, monkeypatch
):
    monkeypatch.setattr(samples, "BATCH", 5)
    batched = look(moa_run, "--data", toy_data)
    for page in (whole, batched):
        assert sorted(each["number"] for (each,) in page["sentences"]) == [*range(1, 13)]
    first, second = (
        [each["source"] for (each,) in page["sentences"]] for page in (whole, batched)
    )
    assert first == second


def test_two_runs_share_the_sentences(look, moa_run, dense_run, toy_data, tmp_path, capsys):
    page = look(moa_run, dense_run, "--data", toy_data)
    assert [run["name"] for run in page["runs"]] == [moa_run.name, dense_run.name]
    for one, other in page["sentences"]:
        assert one["source"] == other["source"] and one["reference"] == other["reference"]
    assert not any(router["experts"] for router in page["runs"][1]["routers"])
    assert page["score"].startswith("nrefs:1|")
    assert all(route["k"] for _, other in page["sentences"] for route in other["routes"])


def test_a_setting_that_is_null_is_not_set_and_a_commit_is_short(
    look, moa_run, dense_run, toy_data, tmp_path
):
    folders = [tmp_path / "one", tmp_path / "other"]
    models = [
        {"arch": "moa", "num_experts": 8, "flags": {}},
        {"arch": "t", "num_experts": None},
    ]
    commit = "62b2bae2537c74ec3ac8cc156fb3e1fd97f2d283"
    for folder, trained, model in zip(folders, (moa_run, dense_run), models):
        shutil.copytree(trained, folder)
        (folder / "recipe.yaml").write_text(yaml.safe_dump({"experiment": "x", "model": model}))
        record = {"inputs": {}, "made_by": [{"commit": commit}]}
        (folder / "state.json").write_text(json.dumps({"train": record}))
    page = look(*folders, "--data", toy_data, "--sentences", 1)
    assert ["model.num_experts", "not set → 8"] in page["differences"]
    assert ["commit", commit[:10]] in page["runs"][0]["result"]["facts"]


def test_an_unfinished_run_has_a_page(look, moa_run, toy_data, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    records = [{"epoch": 1, "loss": "5", "ppl": "9", "lr": "0.1", "num_updates": "1"}]
    records.append({"epoch": 1, "loss": "4", "ppl": "inf", "lr": "0.1", "num_updates": "2"})
    (run / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = look(run)
    assert page["sentences"] == [] and len(page["runs"][0]["notes"]) == 2
    assert page["runs"][0]["curves"]["ppl"]["train"] == [[1, 9.0], [2, None]]
    shutil.copy(moa_run / "checkpoint_last.pt", run / "checkpoints")
    page = look(run, "--data", toy_data, "--sentences", 1)
    assert len(page["sentences"]) == 1 and "checkpoint_last.pt" in " ".join(
        page["runs"][0]["notes"]
    )
    with open(run / "train.jsonl", "a") as log_file:
        log_file.write('{"epoch": "first", "loss": "3"}\n')
    assert main(f"look {run} --output {tmp_path}/damaged.html".split()) == 2
    assert "line 3" in capsys.readouterr().err and not (tmp_path / "damaged.html").exists()


def test_language_models_show_their_surprise(look, save_model, text_data, tmp_path, capsys):
    path = save_model(
        text_data,
        tmp_path / "run" / "checkpoint_best.pt",
        task="language_modeling",
        arch="mae_transformer_lm_base",
    )
    page = look(tmp_path / "run", "--data", text_data, "--sentences", 3)
    assert page["runs"][0]["kind"] == "causal" and len(page["sentences"]) == 3
    model, task = load_trained(path, text_data)
    model.eval()
    for (sentence,) in page["sentences"]:
        tokens = torch.tensor([[task.dictionary.index(text) for text in sentence["target"]]])
        with torch.no_grad():
            log_probs = model.get_normalized_probs(model(tokens), log_probs=True)[0] / math.log(
                2
            )
        expected = -log_probs[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(sentence["bits"][1:]), expected, atol=6e-3, rtol=1e-4
        )
    text = tmp_path / "text"
    text.write_text("\nw1 w2\n")
    (shown,) = look(tmp_path / "run", "--data", text_data, "--input", text)["sentences"]
    assert shown[0]["number"] == 2
    assert "line 1 is skipped: it is empty" in "".join(capsys.readouterr())


def test_a_masked_language_model_guesses_every_seventh_token(
    look, toy_masked_lm, toy_wiki_data
):
    page = look(toy_masked_lm.parent, "--data", toy_wiki_data, "--sentences", 2)
    assert page["runs"][0]["kind"] == "masked"
    model, task = load_trained(toy_masked_lm, toy_wiki_data)
    model.eval()
    dictionary = task.source_dictionary
    (sentence,) = page["sentences"][0]
    spelled = {text: index for index, text in enumerate(dictionary.symbols)}
    assert sentence["target"][0] == "<s>" and None not in sentence["bits"]
    assert sentence["mean_bits"] == pytest.approx(
        sum(sentence["bits"]) / len(sentence["bits"]), abs=0.01
    )
    assert spelled["<mask>"] == task.mask_idx


def test_the_text_that_a_page_shows_is_not_overwritten(moa_run, tmp_path, capsys):
    text = tmp_path / "text.html"
    text.write_text("a\n")
    assert main(f"look {moa_run} --input {text} --output {text}".split()) == 2
    assert "--output" in capsys.readouterr().err and text.read_text() == "a\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("RUN", "RUN", "RUN", "--output", "page.html"), "3 runs"),
        (("RUN", "--output", "page.png"), "--output"),
        (("RUN", "--output", "page.html", "--sentences", "0"), "--sentences"),
        (("RUN/nowhere", "--output", "page.html"), "nowhere"),
        (("RUN", "--output", "RUN/checkpoint_best.pt"), "--output"),
    ],
)
def test_wrong_words_are_named(moa_run, tmp_path, capsys, words, named, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["look", *(word.replace("RUN", str(moa_run)) for word in words)]) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("count", "most"),
    [(0, 0), (1, 1), (299, 299), (300, 300), (301, 151), (449, 225), (600, 301), (601, 201)],
)
def test_a_curve_has_few_points_and_its_last_one(count, most):
    points = [Point(number, None, float(number)) for number in range(count)]
    shown = trained_run._thinned(points)
    assert shown[-1:] == [[number, float(number)] for number in range(count)][-1:]
    assert len(shown) == most


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], [0, 1000, 0, 0, 0, 0]),
        ([0.25, 0.75], [1, 750, 0, 250, 0, 0]),
        ([0.2, 0.1, 0.4, 0.3], [2, 400, 3, 300, 0, 200]),
    ],
)
def test_a_short_sentence_has_fewer_keys_than_are_shown(weights, expected):
    """What fills its row up has no weight."""
    assert routes._strongest(torch.tensor([[weights]]), None, 0) == expected


def test_the_keys_of_a_token_are_those_of_its_own_expert():
    """With --mae-evaluate-with, each token or sequence has one expert of MAE."""
    chosen = torch.tensor([[1], [0]])
    routing = SimpleNamespace(expert_ids=chosen, gates=torch.ones(2, 1), scope="tokens")
    router = routes.Router("a", "target", "target", routing, "experts", torch.eye(2))
    weights = torch.tensor([[0.9, 0.1], [0.3, 0.7]])[:, None, None].expand(2, 1, 2, 2)
    recorded = routes.RecordedPass({"a": weights}, {"a": routing}, 1)
    route = router.route(recorded, 0, torch.tensor([True, True]), with_keys=True)
    assert route["e"] == [1, 0]
    assert rows(route["k"], 6)[:, :4].tolist() == [[1, 700, 0, 300], [0, 900, 1, 100]]


def test_sentences_keep_their_numbers_where_one_is_too_long(monkeypatch):
    class Subset(list):
        def size(self, index):
            return (len(self[index]["source"]), 1)

    subset = Subset({"source": torch.ones(length)} for length in (2, 6, 5))
    monkeypatch.setattr(samples, "load_subset", lambda *_: subset)
    model = SimpleNamespace(
        task=None,
        longest_source=5,
        generate=lambda sources: [[{"tokens": source}] for source in sources],
    )
    found = samples._translations_of_subset(model, samples.Sources(None, "test", None, 3), {})
    assert [sample.numbers for sample in found] == [[1], [3]]


def test_a_line_may_have_as_many_symbols_as_the_model_reads(tmp_path, caplog):
    file = tmp_path / "lines.txt"
    file.write_text("a b c d\n\na b c d e\na\n")
    model = SimpleNamespace(models=[SimpleNamespace(max_positions=lambda: 4)])
    lines = samples._encoded_lines(model, file, lambda line: torch.ones(len(line.split())))
    assert [(number, len(symbols)) for number, symbols in lines] == [(1, 4), (4, 1)]
    assert [record.args for record in caplog.records] == [(2,), (3, 5, 4)]
