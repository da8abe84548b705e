"""Captions to token ids. No torch."""

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from clipctl.data.source import Source
from clipctl.errors import DataError, unreadable
from clipctl.files import read_bounded

PAD_ID, START_ID, UNKNOWN_ID = 0, 1, 2
_FIRST_CHARACTER_ID = 3
FILE_LIMIT_BYTES = 100_000_000
MAX_CONTEXT = 4096
LEARN_LIMIT_CAPTIONS = 1_000_000  # more hardly change a vocabulary
LONGEST_CAPTIONS, COUNTED_CAPTIONS = 2_000, 200_000  # tokenised to find the longest, and to count how many are cut

MIN_WORD_COUNT = 2  # rarer words are spelled: an id seen once learns nothing
WORDS = 16_384  # of `words` without a number; as many as there are, if fewer
KEPT_SPELLINGS = 100_000
LONGEST_PIECE = 64  # characters: a longer run of letters is no word, and every length up to this is tried when spelling
TOKENIZER_HINT = "--tokenizer takes words, characters, bpe:4096, or the path of a tokenizer.json"
MODEL_HINT = "the model's files are damaged or were edited: use another checkpoint, or export the model again"

_START_NAMES = ("<|startoftext|>", "<start>", "<s>", "[CLS]", "<bos>")
_END_NAMES = ("<|endoftext|>", "<end>", "</s>", "[SEP]", "<eos>")


class Tokenizer(Protocol):
    """Turns captions into ids. Padding is 0, and end-of-text is the highest id.

    OpenAI's CLIP and open_clip pool at the highest id, and transformers pools at the configured end id unless that is
    2, so every implementation finds the same end.
    """

    context: int
    start_id: int
    end_id: int
    vocab_size: int

    def encode(self, caption: str) -> NDArray[np.int64]:
        """Ids (context,): start, body, end, padding. A body that is too long is cut."""

    def length(self, caption: str) -> int:
        """Number of ids before the padding, including start and end, if nothing were cut."""

    def to_dict(self) -> dict[str, Any]: ...


def _filled(body: Sequence[int], start_id: int, end_id: int, context: int) -> NDArray[np.int64]:
    body = body[: context - 2]
    ids = np.zeros(context, dtype=np.int64)  # PAD_ID
    ids[: len(body) + 2] = [start_id, *body, end_id]
    return ids


class CharacterTokenizer:
    """One id per character: padding 0, start 1, unknown 2, the alphabet, end."""

    kind = "characters"
    start_id = START_ID

    def __init__(self, alphabet: Sequence[str], context: int) -> None:
        self.alphabet = tuple(alphabet)
        self.context = context
        self._ids = {character: id for id, character in enumerate(alphabet, start=_FIRST_CHARACTER_ID)}
        self.end_id = _FIRST_CHARACTER_ID + len(self.alphabet)
        self.vocab_size = self.end_id + 1

    def encode(self, caption: str) -> NDArray[np.int64]:
        body = [self._ids.get(character, UNKNOWN_ID) for character in normalise(caption)[: self.context - 2]]
        return _filled(body, START_ID, self.end_id, self.context)

    def length(self, caption: str) -> int:
        return len(normalise(caption)) + 2

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "alphabet": "".join(self.alphabet), "context": self.context}


class WordTokenizer:
    """One id per word. A word that is not in the vocabulary is spelled by the longest pieces that are: as WordPiece
    does, where `##` marks a piece that continues a word. So only a new character is unknown; like punctuation, it ends
    a word.

    Ids: padding 0, start 1, unknown 2, the pieces, end.
    """

    kind = "words"
    start_id = START_ID

    def __init__(self, pieces: Sequence[str], context: int) -> None:
        self.pieces, self.context = tuple(pieces), context
        self._ids = {piece: id for id, piece in enumerate(pieces, start=_FIRST_CHARACTER_ID)}
        is_inner = {piece: piece.startswith("##") for piece in pieces}
        self._longest = {  # of the pieces that begin a word, and of those that continue one
            "": max((len(piece) for piece in pieces if not is_inner[piece]), default=1),
            "##": max((len(piece) - 2 for piece in pieces if is_inner[piece]), default=1),
        }
        self._spelled: dict[str, list[int]] = {}
        self.end_id = _FIRST_CHARACTER_ID + len(self.pieces)
        self.vocab_size = self.end_id + 1

    @classmethod
    def learn(cls, captions: Iterable[str], vocab_size: int, context: int) -> "WordTokenizer":
        """Every character, and the words that occur at least twice, the most frequent first."""
        counts = Counter(word for caption in captions for word in split_words(normalise(caption)))
        characters = sorted({character for word in counts for character in word})
        spelled = [*characters, *(f"##{character}" for character in characters)]
        room = max(0, vocab_size - len(spelled) - _FIRST_CHARACTER_ID - 1)
        frequent = sorted(
            (word for word, count in counts.items() if count >= MIN_WORD_COUNT and 1 < len(word) <= LONGEST_PIECE),
            key=lambda word: (-counts[word], word),
        )
        return cls([*spelled, *frequent[:room]], context)

    def encode(self, caption: str) -> NDArray[np.int64]:
        return _filled(self._body(caption), START_ID, self.end_id, self.context)

    def length(self, caption: str) -> int:
        return len(self._body(caption)) + 2

    def _body(self, caption: str) -> list[int]:
        return [id for word in split_words(normalise(caption)) for id in self._spell(word)]

    def _spell(self, word: str) -> list[int]:
        if word in self._ids:
            return [self._ids[word]]
        if word in self._spelled:
            return self._spelled[word]
        ids, start, prefix = [], 0, ""
        while start < len(word):
            ends = range(min(len(word), start + self._longest[prefix]), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self._ids), start + 1)
            ids.append(self._ids.get(prefix + word[start:end], UNKNOWN_ID))
            start, prefix = end, "" if ids[-1] == UNKNOWN_ID else "##"
        if len(word) <= LONGEST_PIECE:  # longer ones hardly ever occur twice
            if len(self._spelled) >= KEPT_SPELLINGS:
                self._spelled.clear()
            self._spelled[word] = ids
        return ids

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "pieces": list(self.pieces), "context": self.context}


class SubwordTokenizer:
    """Subwords from a tokenizer.json, read by the `tokenizers` package: learnt here or supplied by the user.

    If the file's own end-of-text is not its highest id, another id is added, so that end-of-text always exists and is
    the highest.
    """

    kind = "subwords"

    def __init__(self, definition: str, context: int) -> None:
        self._definition, self.context = definition, context
        self._tokenizer = package().Tokenizer.from_str(definition)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        highest = max(ids.values())
        ends = [ids[name] for name in _END_NAMES if name in ids]
        self.end_id = highest if highest in ends else highest + 1
        self.start_id = next((ids[name] for name in _START_NAMES if name in ids), START_ID)
        self.vocab_size = self.end_id + 1

    def __reduce__(self) -> tuple[Any, ...]:
        return SubwordTokenizer, (self._definition, self.context)

    @classmethod
    def learn(cls, captions: Iterable[str], vocab_size: int, context: int) -> "SubwordTokenizer":
        """Byte-level BPE learnt from these captions. It can encode any text, so nothing is unknown."""
        library = package()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.normalizer = library.normalizers.Sequence(
            [library.normalizers.NFC(), library.normalizers.Lowercase()]
        )
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,  # the end is added below
            special_tokens=["<pad>", "<start>", "<unknown>"],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(captions, trainer)
        tokenizer.add_special_tokens(["<end>"])
        return cls(tokenizer.to_str(), context)

    def encode(self, caption: str) -> NDArray[np.int64]:
        return _filled(self._ids(caption), self.start_id, self.end_id, self.context)

    def length(self, caption: str) -> int:
        return len(self._ids(caption)) + 2

    def _ids(self, caption: str) -> list[int]:
        return self._tokenizer.encode(caption, add_special_tokens=False).ids  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "definition": json.loads(self._definition), "context": self.context}


def package() -> Any:
    """The `tokenizers` package."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are processes already
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "this tokenizer needs the tokenizers package, which is not installed",
            "pip install 'clipctl[hub]', or pass --tokenizer words",
        ) from None
    return tokenizers


def make_tokenizer(spec: str, source: Source, context: int) -> Tokenizer:
    """`characters`, `words` or `bpe:VOCABULARY` learnt from the source's captions, or a tokenizer.json."""
    name, _, number = spec.partition(":")
    if name == "characters":
        return CharacterTokenizer(source.alphabet(), context)
    if name == "words":
        return WordTokenizer.learn(_some_captions(source, COUNTED_CAPTIONS), int(number or WORDS), context)
    if name == "bpe":
        return SubwordTokenizer.learn(_some_captions(source, LEARN_LIMIT_CAPTIONS), int(number), context)
    return read_tokenizer(Path(spec), context)


def _some_captions(source: Source, limit: int) -> Iterable[str]:
    """All captions, or an even sample of them."""
    rows = len(source.caption_sizes())
    return map(source.caption_row, range(0, rows, -(-rows // limit)))


def read_tokenizer(path: Path, context: int) -> SubwordTokenizer:
    """A tokenizer.json from disk, or the one in a directory."""
    try:
        path = path / "tokenizer.json" if path.is_dir() else path
        content = read_bounded(path.resolve(), FILE_LIMIT_BYTES)  # in a hub's cache, files are links
        tokenizer = SubwordTokenizer(content.decode(), context)
        tokenizer.encode("a picture of 3 Ünknown things")  # some files fail only when used
        return tokenizer
    except FileNotFoundError:
        raise DataError(f"no such tokenizer: {path}", TOKENIZER_HINT) from None
    except OSError as error:
        raise unreadable(path, error) from None
    except DataError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise DataError(f"{path} is not a valid tokenizer.json: {str(error)[:120]}", TOKENIZER_HINT) from None


def from_dict(document: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` describes. Raises DataError for anything else."""
    if not isinstance(document, dict):
        raise DataError("this is not the description of a tokenizer", MODEL_HINT)
    kind, context = document.get("kind"), document.get("context")
    if type(context) is not int or not 3 <= context <= MAX_CONTEXT:
        raise DataError(f"the model's tokenizer has a context of {str(context)[:40]!r}", MODEL_HINT)
    if kind == CharacterTokenizer.kind and isinstance(document.get("alphabet"), str):
        return CharacterTokenizer(document["alphabet"], context)
    if kind == WordTokenizer.kind and _are_texts(document.get("pieces")):
        if any(len(piece.removeprefix("##")) > LONGEST_PIECE for piece in document["pieces"]):
            raise DataError(f"the model's tokenizer has a piece of more than {LONGEST_PIECE} characters", MODEL_HINT)
        return WordTokenizer(document["pieces"], context)
    if kind == SubwordTokenizer.kind and isinstance(document.get("definition"), dict):
        try:
            return SubwordTokenizer(json.dumps(document["definition"]), context)
        except DataError:
            raise
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"the model's tokenizer is not valid: {str(error)[:120]}", MODEL_HINT) from None
    raise DataError(f"the model's tokenizer is incomplete or of an unknown kind, {str(kind)[:40]!r}", MODEL_HINT)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


class CaptionFit(NamedTuple):
    """How captions fit into the context."""

    longest: int  # ids in the longest caption, after cutting
    cut: int  # number of captions that are cut


def caption_fit(tokenizer: Tokenizer, source: Source) -> CaptionFit:
    """Counted before training. A text hardly ever has more tokens than bytes, plus one for a leading space, so only
    captions with enough bytes need to be tokenised; if there are very many, an even sample of them."""
    context = tokenizer.context
    if isinstance(tokenizer, CharacterTokenizer):
        lengths = source.caption_lengths() + 2
        return CaptionFit(min(int(lengths.max()), context), int((lengths > context).sum()))
    sizes = source.caption_sizes()
    rows = np.flatnonzero(sizes + 3 > context)
    if not len(rows):
        rows = np.argsort(sizes, kind="stable")[-LONGEST_CAPTIONS:]
    step = -(-len(rows) // COUNTED_CAPTIONS)
    lengths = np.array([tokenizer.length(source.caption_row(int(row))) for row in rows[::step]])
    return CaptionFit(min(int(lengths.max()), context), int((lengths > context).sum()) * step)


def words_cut(cut: int, captions: int, tokenizer: Tokenizer) -> str:
    by_characters = isinstance(tokenizer, CharacterTokenizer)
    noun = "characters" if by_characters else "tokens"
    way_out = "--tokenizer bpe:4096 needs fewer tokens, " if by_characters else ""
    return (
        f"{cut:,} of {captions:,} captions are longer than {tokenizer.context - 2} {noun} and are cut; {way_out}"
        f"--set model.text.context={2 * tokenizer.context} doubles the limit"
    )


_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")


def split_words(text: str) -> list[str]:
    """Runs of letters and digits; every other character that is not a space stands alone."""
    return _WORD.findall(text)


def normalise(caption: str) -> str:
    """Composed (NFC) characters, lower case, single spaces."""
    return " ".join(unicodedata.normalize("NFC", caption).lower().split())
