"""Our tokenizers as a tokenizer.json that gives the same ids in transformers, open_clip and transformers.js."""

import json
import re
from pathlib import Path
from typing import Any

from clipctl.data.tokenizers import (
    PAD_ID,
    START_ID,
    UNKNOWN_ID,
    CharacterTokenizer,
    SubwordTokenizer,
    Tokenizer,
    WordTokenizer,
    package,
)
from clipctl.errors import DataError

_NAMES = {PAD_ID: "<pad>", START_ID: "<start>", UNKNOWN_ID: "<unknown>"}
_END = "<end>"
SAFETENSORS_HINT = "export with --to safetensors, which keeps the tokenizer as it is"


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    whole = library_tokenizer(tokenizer)
    (directory / "tokenizer.json").write_text(whole.to_str(pretty=True), encoding="utf-8")
    names = special_names(tokenizer, whole)
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": tokenizer.context,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (directory / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """As transformers' config names them."""
    return {"bos_token_id": tokenizer.start_id, "eos_token_id": tokenizer.end_id, "pad_token_id": PAD_ID}


def special_names(tokenizer: Tokenizer, whole: Any) -> dict[str, str]:
    names = {"bos_token": whole.id_to_token(tokenizer.start_id), "eos_token": whole.id_to_token(tokenizer.end_id)}
    return {**names, "pad_token": whole.id_to_token(PAD_ID), "unk_token": _unknown_of(tokenizer, whole)}


def _unknown_of(tokenizer: Tokenizer, whole: Any) -> str:
    """Byte-level subwords can encode everything; a token is named anyway, because transformers wants one."""
    if isinstance(tokenizer, SubwordTokenizer):
        return str(json.loads(whole.to_str())["model"].get("unk_token") or whole.id_to_token(tokenizer.end_id))
    return _NAMES[UNKNOWN_ID]


def library_tokenizer(tokenizer: Tokenizer) -> Any:
    """A tokenizers.Tokenizer: start, body and end, without padding; cut to the context."""
    if isinstance(tokenizer, CharacterTokenizer):
        whole = _characters(tokenizer)
    elif isinstance(tokenizer, WordTokenizer):
        whole = _words(tokenizer)
    elif isinstance(tokenizer, SubwordTokenizer):
        whole = _subwords(tokenizer)
    else:
        raise DataError(
            f"a tokenizer of kind {type(tokenizer).__name__} cannot be written as tokenizer.json", SAFETENSORS_HINT
        )
    tokens = {id: whole.id_to_token(id) for id in (tokenizer.start_id, tokenizer.end_id)}
    whole.post_processor = package().processors.TemplateProcessing(
        single=f"{tokens[tokenizer.start_id]} $A {tokens[tokenizer.end_id]}",
        special_tokens=[(name, id) for id, name in tokens.items()],
    )
    whole.enable_truncation(tokenizer.context)
    return whole


def _characters(tokenizer: CharacterTokenizer) -> Any:
    library = package()
    ids = {character: id for id, character in enumerate(tokenizer.alphabet, start=UNKNOWN_ID + 1)}
    vocabulary = _with_specials(ids, tokenizer.end_id)
    whole = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=_NAMES[UNKNOWN_ID]))
    whole.normalizer = library.normalizers.Sequence(_normalisers())
    whole.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
    return whole


def _words(tokenizer: WordTokenizer) -> Any:
    """WordPiece makes a whole word unknown if one letter is; so an unknown letter is made a word of its own, as in
    `WordTokenizer`."""
    library = package()
    ids = {piece: id for id, piece in enumerate(tokenizer.pieces, start=UNKNOWN_ID + 1)}
    vocabulary = _with_specials(ids, tokenizer.end_id)
    whole = library.Tokenizer(
        library.models.WordPiece(vocabulary, unk_token=_NAMES[UNKNOWN_ID], max_input_chars_per_word=1_000_000)
    )
    whole.normalizer = library.normalizers.Sequence(_normalisers())
    letters = "".join(re.escape(piece) for piece in sorted(ids) if len(piece) == 1 and piece.isalnum())
    pieces = library.Regex(rf"[{letters}]+|\S" if letters else r"\S")
    whole.pre_tokenizer = library.pre_tokenizers.Split(pieces, "removed", invert=True)
    return whole


def _subwords(tokenizer: SubwordTokenizer) -> Any:
    whole = package().Tokenizer.from_str(json.dumps(tokenizer.to_dict()["definition"]))
    whole.no_padding()
    if whole.id_to_token(tokenizer.end_id) is None:  # the file had no end-of-text as its highest id
        whole.add_special_tokens([_END])
    if whole.token_to_id(whole.id_to_token(tokenizer.end_id)) != tokenizer.end_id:
        raise DataError("this tokenizer's end-of-text cannot be written as tokenizer.json", SAFETENSORS_HINT)
    return whole


def _normalisers() -> list[Any]:
    """What `data.tokenizers.normalise` does: composed characters, lower case, single spaces."""
    normalizers = package().normalizers
    spaces = normalizers.Replace(package().Regex(r"\s+"), " ")
    return [normalizers.NFC(), normalizers.Lowercase(), spaces, normalizers.Strip()]


def _with_specials(ids: dict[str, int], end_id: int) -> dict[str, int]:
    return {**{name: id for id, name in _NAMES.items()}, **ids, _END: end_id}
