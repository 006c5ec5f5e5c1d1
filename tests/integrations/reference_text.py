"""Run by fairseq's environment: exported tokenizers, and what the run's own commands make of a text.

.venv/bin/python tests/integrations/reference_text.py FOLDER SOURCE TARGET en de [LINES]
"""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe import GPT2BPE
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder

from moa_fairseq.experiments.data import pieces
from moa_fairseq.experiments.data.parallel_text import read_lines
from moa_fairseq.experiments.data.text_stages import learn_codes, load_codes
from moa_fairseq.experiments.inference.text_model import TextModel
from moa_fairseq.experiments.inference.transformers_folder import write_tokenizer
from moa_fairseq.experiments.recipes.schema import CAUSAL_LM, MASKED_LM, TRANSLATION
from moa_fairseq.text.codecs import (
    ByteCodec,
    Gpt2Codec,
    MergeCodec,
    PieceCodec,
    TranslationCodec,
    WordCodec,
)


def moses(language):
    return (
        ("normalize_punctuation", {"lang": language}),
        ("remove_nonprinting", {}),
        ("tokenize", {"lang": language, "aggressive_hyphens": True}),
    )


def dictionary_of(texts):
    """Of all but the rare symbols, so that a text has some that are unknown."""
    found = Dictionary()
    for symbol in itertools.chain.from_iterable(text.split() for text in texts):
        found.add_symbol(symbol)
    found.finalize(threshold=2, padding_factor=1)
    return found


def write(folder, codec, kind, sides):
    """The tokenizer, and the ids of every line of both sides, and the lines that these are again."""
    folder.mkdir(parents=True)
    encode = [codec.encode, getattr(codec, "encode_target", codec.encode)]
    symbols = [[function(line) for line in lines] for function, lines in zip(encode, sides)]
    dictionaries = [dictionary_of(side) for side in symbols]
    write_tokenizer(folder, codec, kind, dictionaries, 1024)
    model = TextModel.__new__(
        TextModel
    )  # fairseq's hub interface, of whose model nothing is asked
    torch.nn.Module.__init__(model)
    model.codec = codec
    model.bpe = None
    model.tokenizer = None
    model.src_dict, model.tgt_dict = dictionaries
    ids = [
        [model.binarize(line).tolist() for line in symbols[0]],
        [
            dictionaries[1].encode_line(line, add_if_not_exist=False).tolist()
            for line in symbols[1]
        ],
    ]
    back = [model.decode(torch.tensor(row)) for row in ids[1]]
    text = {"source": sides[0], "target": sides[1], "ids": ids, "back": back}
    (folder / "reference.json").write_text(json.dumps(text), encoding="utf-8")


def gpt2_codec(place):
    """fairseq's own encoding, of a small encoder.json and vocab.bpe."""
    letters = list(bytes_to_unicode().values())
    merges = [
        ("Ġ", "t"),
        ("h", "e"),
        ("Ġt", "he"),
        ("u", "t"),
        ("Ġ", "w"),
        ("t", "o"),
        ("to", "n"),
    ]
    encoder = {
        symbol: number for number, symbol in enumerate([*letters, *map("".join, merges)])
    }
    (place / "encoder.json").write_text(json.dumps(encoder))
    (place / "vocab.bpe").write_text("#version\n" + "".join(f"{a} {b}\n" for a, b in merges))
    files = (str(place / "encoder.json"), str(place / "vocab.bpe"))
    codec = Gpt2Codec(*files)
    bpe = get_encoder(*files)

    def encode(line):  # as RobertaHubInterface.fill_mask does
        spans = line.split("<mask>")
        spans = [span.rstrip() for span in spans] if len(spans) > 1 else spans
        return " <mask> ".join(" ".join(map(str, bpe.encode(span))) for span in spans).strip()

    codec.encode = encode
    codec.decode = GPT2BPE.decode.__get__(SimpleNamespace(bpe=bpe))
    return codec


if __name__ == "__main__":
    place, *files = map(Path, sys.argv[1:4])
    languages = sys.argv[4:6]
    most = int(sys.argv[6]) if len(sys.argv) > 6 else None
    sides = [list(itertools.islice(read_lines(path), most)) for path in files]
    place.mkdir(parents=True, exist_ok=True)
    tokens = [place / language for language in languages]
    for path, lines, language in zip(tokens, sides, languages):
        treated = TranslationCodec(moses(language))
        path.write_text(
            "".join(f"{treated.encode(line)}\n" for line in lines), encoding="utf-8"
        )
    learn_codes(tokens, 4000, place / "codes")
    learned = []
    for path, lines in zip(files, sides):
        model = place / f"{path.name}.model"
        pieces.learn(lines, path, 4000, model, **pieces.translation_settings("unigram", True))
        learned.append(PieceCodec(pieces.processor(str(model))))
    merges = MergeCodec(load_codes(str(place / "codes")))
    steps = moses(languages[0])
    for name, chosen, pair in (
        ("merges", steps, (merges, merges)),
        ("pieces", (), tuple(learned)),
        ("words", steps[:2], (WordCodec(), WordCodec())),
    ):
        write(place / name, TranslationCodec(chosen, pair, languages[1]), TRANSLATION, sides)
    write(place / "bytes", ByteCodec(), CAUSAL_LM, [sides[0], sides[0]])
    masked = [f"{line[:9]} <mask>{line[9:]}" for line in sides[0]]
    write(place / "gpt2", gpt2_codec(place), MASKED_LM, [sides[0] + masked, sides[0] + masked])
