"""Foreign files whose cost is out of proportion to their size: time and memory stay within bounds."""

import time

import pytest

from clipctl.data import tokenizers
from clipctl.data.tokenizers import LONGEST_PIECE, WordTokenizer
from clipctl.errors import DataError

LIMIT_S = 2.0

# --- words --------------------------------------------------------------------------------------------------------


def test_words_without_end_are_spelled_and_not_learnt():
    long = ["ab" * 4_999 + str(number) for number in range(20)]
    started = time.process_time()
    tokenizer = WordTokenizer.learn([*long, *long, "a cat", "a cat"], 1000, 20)
    lengths = [tokenizer.length(word) for word in long]
    assert time.process_time() - started < LIMIT_S
    assert lengths == [len(word) + 2 for word in long] and "cat" in tokenizer.pieces
    assert max(map(len, tokenizer.pieces)) == 3


def test_pieces_that_no_word_has_are_refused():
    pieces = ["a", "b", "##b" + "a" * LONGEST_PIECE]
    with pytest.raises(DataError, match="a piece of more than 64 characters"):
        tokenizers.from_dict({"kind": "words", "pieces": pieces, "context": 20})
    tokenizers.from_dict({"kind": "words", "pieces": ["a", "##" + "a" * LONGEST_PIECE], "context": 20})
