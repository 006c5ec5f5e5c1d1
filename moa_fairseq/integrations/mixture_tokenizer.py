"""The tokenizer of exported models, for Hugging Face's transformers.

After an import of `mixture_transformer`, AutoTokenizer reads it from the folders of `moa-fairseq export
--transformers`. It needs regex and sacremoses, and sentencepiece or subword-nmt if the run has pieces or
merges.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer

from moa_fairseq.errors import UserError, check_choice

SEGMENTATIONS = ("merges", "pieces", "bytes", "gpt2", "words")


class MixtureTokenizer(PreTrainedTokenizer):
    """Converts raw text to the ids of a model and back, as the commands of the run do.

    It encodes text of the source language, and `text_target` of the target language; it decodes the target
    language. As in fairseq, <unk> is decoded even with skip_special_tokens.

    Args:
        vocab_file: JSON with the lists of symbols by id, "source" and, if it differs, "target".
        merges_file: the merges of subword-nmt.
        source_spm, target_spm: the models of SentencePiece; target_spm only if there are two.
        gpt2_encoder, gpt2_merges: the files encoder.json and vocab.bpe.
        segmentation: a name in SEGMENTATIONS.
        steps: line functions of the source language, with their options.
        target_language: the language of decoded text; None: the model is a language model.
        prefix, suffix: the symbols before and after every encoded text; a `text_target` has only </s> after
            it.
        options: those of transformers.
    """

    vocab_files_names: ClassVar[dict[str, str]] = {
        "vocab_file": "vocab.json",
        "merges_file": "merges.codes",
        "source_spm": "source.spm",
        "target_spm": "target.spm",
        "gpt2_encoder": "encoder.json",
        "gpt2_merges": "vocab.bpe",
    }
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(
        self,
        vocab_file: str,
        merges_file: str | None = None,
        source_spm: str | None = None,
        target_spm: str | None = None,
        gpt2_encoder: str | None = None,
        gpt2_merges: str | None = None,
        segmentation: str = "words",
        steps: Sequence[Any] = (),
        target_language: str | None = None,
        prefix: Sequence[str] = (),
        suffix: Sequence[str] = ("</s>",),
        **options: Any,
    ):
        check_choice("segmentation", segmentation, SEGMENTATIONS)
        self._files = {
            "vocab_file": vocab_file,
            "merges_file": merges_file,
            "source_spm": source_spm,
            "target_spm": target_spm,
            "gpt2_encoder": gpt2_encoder,
            "gpt2_merges": gpt2_merges,
        }
        with open(vocab_file, encoding="utf-8") as stream:
            symbols = json.load(stream)
        self._symbols = {"target": symbols["source"]} | symbols  # the same if there is no target
        self._ids: dict[str, dict[str, int]] = {}
        for side, names in self._symbols.items():
            # As in fairseq, a symbol that is listed twice has its last id
            self._ids[side] = dict(zip(names, range(len(names))))
        self._side = "source"
        self._codec = _codec(segmentation, self._files, steps, target_language)
        self.prefix, self.suffix = list(prefix), list(suffix)
        special_tokens = {
            "bos_token": "<s>",
            "pad_token": "<pad>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        }
        super().__init__(
            segmentation=segmentation,
            steps=list(steps),
            target_language=target_language,
            prefix=self.prefix,
            suffix=self.suffix,
            **(special_tokens | options),
        )

    @property
    def vocab_size(self) -> int:
        """The number of symbols of the language that is encoded now."""
        return len(self._symbols[self._side])

    def get_vocab(self) -> dict[str, int]:
        """Symbol → id, for the language that is encoded now."""
        return self._ids[self._side] | self.added_tokens_encoder

    def _switch_to_input_mode(self) -> None:
        self._side = "source"

    def _switch_to_target_mode(self) -> None:
        self._side = "target"

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Split raw text into symbols.

        Args:
            text: one line.
            kwargs: not used.
        """
        encode = self._codec.encode
        if self._side == "target" and hasattr(self._codec, "encode_target"):
            encode = self._codec.encode_target
        return encode(text).split()

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        ids = self._ids[self._side]
        return ids.get(token, ids["<unk>"])

    # Both methods of transformers, because its added tokens have the ids of one side
    _convert_token_to_id = _convert_token_to_id_with_added_voc

    def _convert_id_to_token(self, index: int) -> str:
        return self._symbols[self._side][index]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Add the ids of the special symbols.

        Args:
            token_ids_0: the ids of a text.
            token_ids_1: None; these models do not read a second text.
        """
        if token_ids_1 is not None:
            raise UserError(
                "These models read one text, and a pair was given: give the second as text_target."
            )
        is_target = self._side == "target"
        before, after = ([], ["</s>"]) if is_target else (self.prefix, self.suffix)
        id_of = self._ids[self._side].__getitem__
        return [*map(id_of, before), *token_ids_0, *map(id_of, after)]

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        symbols = [self._symbols["target"][int(number)] for number in ids]
        if skip_special_tokens:
            left_out = {self.bos_token, self.pad_token, self.eos_token}
            symbols = [symbol for symbol in symbols if symbol not in left_out]
        return self._codec.decode(" ".join(symbols))

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Copy the files of the tokenizer. Returns their paths.

        Args:
            save_directory: the folder of the copies.
            filename_prefix: a prefix of their names, or None.
        """
        written = []
        for argument, path in self._files.items():
            if path is not None:
                name = self.vocab_files_names[argument]
                if filename_prefix:
                    name = f"{filename_prefix}-{name}"
                new = Path(save_directory, name)
                if not (new.exists() and os.path.samefile(new, path)):
                    shutil.copyfile(path, new)
                written.append(str(new))
        return tuple(written)


def _codec(
    segmentation: str, files: dict[str, Any], steps: Sequence[Any], target_language: str | None
) -> Any:
    """The codec of raw text and symbols. Its libraries are imported here, as a model works without them."""
    from moa_fairseq.text import codecs

    source: Any
    target: Any
    if segmentation == "gpt2":
        return codecs.Gpt2Codec(files["gpt2_encoder"], files["gpt2_merges"])
    if segmentation == "merges":
        from subword_nmt.apply_bpe import BPE

        with open(str(files["merges_file"]), encoding="utf-8") as stream:
            source = target = codecs.MergeCodec(BPE(stream))
    elif segmentation == "pieces":
        from sentencepiece import SentencePieceProcessor

        source = target = codecs.PieceCodec(SentencePieceProcessor(model_file=files["source_spm"]))
        if files["target_spm"] is not None:
            target = codecs.PieceCodec(SentencePieceProcessor(model_file=files["target_spm"]))
    else:
        source = target = codecs.ByteCodec() if segmentation == "bytes" else codecs.WordCodec()
    if target_language is None:
        return source
    return codecs.TranslationCodec(tuple(steps), (source, target), target_language)
