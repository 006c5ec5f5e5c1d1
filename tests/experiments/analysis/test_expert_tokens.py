"""PMI against numbers computed by hand; pieces and words; whose tokens count for which expert."""

import math

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

from moa_fairseq.cli import main
from moa_fairseq.experiments.analysis.expert_tokens import (
    TokenCounter,
    attributed,
    bpe_words,
    sentencepiece_words,
    single_symbols,
)
from moa_fairseq.experiments.analysis.gpt2_pieces import Gpt2Pieces
from moa_fairseq.experiments.scoring.trained_model import load_trained
from moa_fairseq.layers.routing import Routing


def one_hot(*sentences, num_experts=2):
    """[B, T, E] from the experts of each position, a number or several."""
    chosen = torch.zeros(len(sentences), len(sentences[0]), num_experts, dtype=torch.bool)
    for row, places in enumerate(sentences):
        for position, experts in enumerate(places):
            chosen[row, position, experts] = True
    return chosen


def test_pmi_by_hand():
    counter = TokenCounter()
    counter.add(
        [["a", "a", "b", None], ["a", "b", "b", "c"]], one_hot([0, 0, 0, 0], [1, 1, 1, 1])
    )
    # expert 0 has a, a, b; expert 1 has a, b, b, c: of 7 tokens
    assert counter.expert_shares() == pytest.approx([3 / 7, 4 / 7])
    first, second = counter.indicative(top=3, min_count=1)
    assert [token["token"] for token in first] == ["a", "b"]
    assert first[0]["pmi"] == pytest.approx(math.log((2 / 7) / (3 / 7 * 3 / 7)))
    assert first[1]["pmi"] == pytest.approx(math.log((1 / 7) / (3 / 7 * 3 / 7)))
    assert [token["token"] for token in second] == ["c", "b", "a"]
    assert second[0]["pmi"] == pytest.approx(math.log((1 / 7) / (1 / 7 * 4 / 7)))
    assert [token["token"] for token in counter.indicative(top=1, min_count=2)[1]] == ["b"]


def test_among_equals_the_more_frequent_token_comes_first():
    counter = TokenCounter()
    counter.add([["a", "c", "b", "c"]], one_hot([0, 0, 0, 0], num_experts=1))
    assert [token["token"] for token in counter.indicative(top=3, min_count=1)[0]] == [
        "c",
        "a",
        "b",
    ]


def test_a_token_counts_for_every_expert_that_it_chose():
    counter = TokenCounter()
    counter.add([["a", "b"]], one_hot([[0, 1], [1, 2]], num_experts=4))
    first, second, _, nobody = counter.indicative(top=2, min_count=1)
    assert counter.occurrences == {"a": 1, "b": 1} and counter.expert_shares() == [
        0.25,
        0.5,
        0.25,
        0.0,
    ]
    assert first[0]["pmi"] == pytest.approx(math.log((1 / 4) / (1 / 2 * 1 / 4)))
    assert [(token["token"], token["pmi"]) for token in second] == [("a", 0.0), ("b", 0.0)]
    assert nobody == []


def test_pieces_and_words():
    split = [
        None,
        "\u2581un",
        "able",
        "\u2581cat",
        None,
        "ing",
        "\u2581caf",
        "<0xC3>",
        "<0xA9>",
    ]
    assert list(sentencepiece_words(split)) == [
        ("unable", [1, 2]),
        ("cat", [3]),
        ("café", [6, 7, 8]),
    ]
    symbols = [None, "un@@", "able", "cat", "run@@", None, "x@@", "y@@", "z", "cut@@"]
    assert list(single_symbols(symbols[:3])) == [("un@@", [1]), ("able", [2])]
    assert list(bpe_words(symbols)) == [("unable", [1, 2]), ("cat", [3]), ("xyz", [6, 7, 8])]
    counter = TokenCounter(bpe_words)
    counter.add([["un@@", "able", "cat"]], one_hot([0, 1, 1]))
    assert counter.expert_shares() == [0.25, 0.75]
    first, second = counter.indicative(top=2, min_count=1)
    assert [(token["token"], token["count"]) for token in first] == [("unable", 0.5)]
    assert second[0]["token"] == "cat" and second[0]["pmi"] == pytest.approx(
        math.log((1 / 2) / (1 / 2 * 3 / 4))
    )


def test_rows_of_a_decision_find_their_positions():
    probs = torch.eye(6)[:, :5] + 0.1  # row r prefers expert r; the last one prefers expert 0
    everything = torch.arange(5).expand(6, -1)
    decision = Routing(everything, probs, probs, probs, 5)
    assert attributed(decision, 2, 3).int().argmax(-1).tolist() == [[0, 1, 2], [3, 4, 0]]
    chosen = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 0], [0, 2]])
    some = attributed(Routing(chosen, probs[:, :2], probs, probs, 5), 2, 3)
    assert [row.nonzero().flatten().tolist() for row in some.view(6, -1)] == [
        sorted(pair) for pair in chosen.tolist()
    ]
    whole = attributed(Routing(everything, probs, probs, probs, 5, scope="sequences"), 6, 4)
    assert whole.shape == (6, 4, 5) and whole.int().argmax(-1)[:, 3].tolist() == [
        0,
        1,
        2,
        3,
        4,
        0,
    ]


def literal_table(sentences, module, dictionary, k=1):
    """{(token, expert): count}, one sentence at a time."""
    table = {}
    for net_input, decisions in sentences:
        probs = dict(decisions)[module].probs
        tokens = net_input[
            "prev_output_tokens" if module.startswith("decoder") else "src_tokens"
        ][0].tolist()
        for position, token in enumerate(tokens):
            if token >= dictionary.nspecial:
                row = probs[position if len(probs) > 1 else 0]
                for expert in row.topk(k).indices.tolist():
                    key = (dictionary[token], expert)
                    table[key] = table.get(key, 0) + 1
    return table


def check_table(found, table, num_experts):
    total = sum(table.values())
    by_expert = [
        sum(count for (_, e), count in table.items() if e == expert)
        for expert in range(num_experts)
    ]
    assert found["shares"] == pytest.approx([count / total for count in by_expert])
    for expert, tokens in enumerate(found["tokens"]):
        expected = {}
        for (token, e), count in table.items():
            mine = sum(c for (t, _), c in table.items() if t == token)
            if e == expert:
                expected[token] = math.log(count * total / (mine * by_expert[expert]))
        assert {token["token"]: pytest.approx(token["pmi"]) for token in tokens} == expected
        assert [token["pmi"] for token in tokens] == pytest.approx(
            sorted(expected.values(), reverse=True)
        )


@pytest.mark.parametrize(
    "family, module",
    [
        ("mae", None),
        ("mae", "decoder.layers.1.encoder_attn"),
        ("mae", "decoder.layers.0.self_attn"),
        ("moa", "decoder.layers.0.self_attn"),
    ],
)
def test_a_loop_over_single_sentences_finds_the_same(
    mae, toy_checkpoint, toy_data, analyze, each_sentence, family, module
):
    checkpoint, k = (mae, 1) if family == "mae" else (toy_checkpoint, 4)
    flags = (
        "--top",
        99,
        "--min-count",
        1,
        "--max-tokens",
        60,
        *(["--module", module] if module else []),
    )
    found = analyze("expert-tokens", checkpoint, toy_data, *flags)
    assert found["name"] == (module or "encoder.layers.0.self_attn")
    assert found["tokens_counted"] == len((toy_data.parent / "valid.en").read_text().split())
    dictionary = Dictionary.load(str(toy_data / "dict.en.txt"))
    table = literal_table(each_sentence(checkpoint, toy_data), found["name"], dictionary, k)
    check_table(found, table, 8)
    assert sum(share > 0 for share in found["shares"]) > 2


@pytest.mark.parametrize(
    "module", ["decoder.layers.0.encoder_attn", "decoder.layers.0.self_attn"]
)
def test_tokens_of_keys_are_those_at_the_keys(save_model, toy_data, tmp_path, analyze, module):
    flags = ("--num-experts", "3", "--experts-per-token", "2")
    path = save_model(
        toy_data, tmp_path / "model.pt", *flags, arch="switchhead_transformer_tiny"
    )
    more = ("--module", f"{module}.keys", "--min-count", 1, "--top", 99, "--max-tokens", 60)
    found = analyze("expert-tokens", path, toy_data, *more)
    side = "en" if "encoder" in module else "de"
    text = (toy_data.parent / f"valid.{side}").read_text().split()
    dictionary = Dictionary.load(str(toy_data / f"dict.{side}.txt"))
    known = [word for word in text if dictionary.index(word) != dictionary.unk()]
    assert (found["name"], found["tokens_counted"]) == (f"{module}.keys", len(known))
    shown = {row["token"] for tokens in found["tokens"] for row in tokens}
    assert shown == set(known)


def test_command_lists_and_writes(mae, toy_data, analyze, capsys):
    report = analyze("expert-tokens", mae, toy_data, "--top", 2, "--words")
    printed = capsys.readouterr().out
    assert report["words"] is True and len(report["tokens"]) == 8
    best = next(tokens for tokens in report["tokens"] if tokens)[0]
    assert (
        f"{best['token']} ({best['pmi']:.2f})" in printed
        and "encoder.layers.0.self_attn" in printed
    )


def test_what_has_no_answer_is_refused(mae, uniform_mae, toy_data, capsys):
    for model, flags, says in (
        (mae, "--top 0", "--top 0"),
        (mae, "--module encoder.x", "--module encoder.x"),
        (uniform_mae, "", "encoder.layers.0.self_attn is uniform"),
    ):
        line = f"analyze expert-tokens {model} --data {toy_data} --cpu {flags}"
        assert main(line.split()) == 2
        assert says in capsys.readouterr().err


# --- masked language models over GPT-2's byte-pair encoding ------------------------------------------


def test_pieces_and_words_of_gpt2(toy_gpt2):
    spelling = Gpt2Pieces(get_encoder(str(toy_gpt2.encoder), str(toy_gpt2.vocab)))
    line = "the cat sat – on"
    symbols = [None, *map(str, spelling.encoder.encode(line)), None]
    listed = [text for text, _ in spelling.pieces(symbols)]
    assert listed[:4] == ["t", "he", " cat", " "] and "sa" in listed
    assert (
        r"\xe2" in listed and r"\x93" in listed
    )  # bytes that are not characters by themselves
    found = list(spelling.words(symbols))
    assert [word for word, _ in found] == line.split()
    assert [position for _, positions in found for position in positions] == [
        *range(1, len(symbols) - 1)
    ]
    # whether a word ends where its sample is cut off is not known
    assert [word for word, _ in spelling.words(symbols[:-1])] == line.split()[:-1]
    assert [word for word, _ in spelling.words([None, *symbols[2:]])][:2] == ["he", "cat"]
    spelling.cut_samples = True
    assert [word for word, _ in spelling.words([None, *symbols[2:]])][:2] == ["cat", "sat"]
    assert [word for word, _ in spelling.words([None, *symbols])] == line.split()


def test_hidden_positions_count_for_nobody():
    counter = TokenCounter(bpe_words)
    hidden = torch.tensor([[False, True, False, True]])
    counter.add([["un@@", "able", "cat", "dog"]], one_hot([0, 1, 1, 0]), hidden)
    assert counter.occurrences == {"cat": 1}


@pytest.mark.parametrize("join_words", [False, True])
def test_a_masked_model_shows_text_and_leaves_masked_positions_out(
    toy_masked_lm, toy_wiki_data, toy_gpt2, analyze, capsys, join_words
):
    flags = ("--top", 999, "--min-count", 1, *["--words"] * join_words)
    found = analyze("expert-tokens", toy_masked_lm, toy_wiki_data, *flags)
    printed = capsys.readouterr().out
    assert f"{found['masked_out']} masked positions left out" in printed
    assert join_words or ("' cat' (" in printed and "<mask>" not in printed)
    tokens = {token["token"] for expert in found["tokens"] for token in expert}
    assert "<mask>" not in tokens and not any(token.isdigit() for token in tokens)
    assert {"cat", "mat"} & tokens if join_words else {" cat", " the"} <= tokens
    _, task = load_trained(toy_masked_lm, toy_wiki_data)
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    dataset.set_epoch(1)
    batch = dataset.collater([dataset[number] for number in range(len(dataset))])
    pad = task.source_dictionary.pad()
    source = batch["net_input"]["src_tokens"]
    masked = batch["target"].ne(pad)
    special = task.source_dictionary.nspecial
    original = torch.where(masked, batch["target"], source)
    text = original.ge(special)
    assert found["masked_out"] == int((masked & text).sum()) > 0
    if not join_words:
        assert found["tokens_counted"] == int((~masked & text).sum())
