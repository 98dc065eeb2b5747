"""Checksums against the formula in their docstring, computed word by word with Python's integers."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyengine.checksums import BLOCK_WORDS, PIECE_NBYTES, Records, bank_sums, packed, sums_of, unpacked, weights_of
from copyengine.wire.errors import RequestRefused

SIZES = (1, 32, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 3 * BLOCK_WORDS + 32)


def records_of(n: int, words: int, seed: int = 0) -> Records:
    return np.random.default_rng(seed).integers(0, 256, (n, 4 * words), np.uint8)


def word_by_word(record: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> int:
    weights = weights_of(record.nbytes)
    within, blocks = weights.within.tolist(), weights.blocks.tolist()
    words = np.frombuffer(record.tobytes(), "<i4").tolist()
    total: int = sum(w * within[i % BLOCK_WORDS] * blocks[i // BLOCK_WORDS] for i, w in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("words", SIZES)
def test_sums_are_those_of_the_formula(words: int) -> None:
    records = records_of(3, words)
    assert sums_of(records, weights_of(4 * words)).tolist() == [word_by_word(record) for record in records]


def test_all_numbers_that_words_are_multiplied_by_are_odd_and_differ() -> None:
    """So that no single word can change unseen, and no two can change places."""
    weights = weights_of(4 * 5000 * BLOCK_WORDS)
    for numbers in weights:
        assert (numbers % 2 == 1).all() and len(set(numbers.tolist())) == len(numbers)


def test_the_numbers_are_those_of_splitmix64() -> None:
    """Against the first outputs of its authors' program from seed 0, made odd."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [int(n) % 2**64 for n in weights_of(4).within[:4]] == [n | 1 for n in first]


@given(st.integers(0, 2**32 - 1), st.data())
def test_what_happens_to_copies_shows(seed: int, data: st.DataObject) -> None:
    """A word that differs in any way, a run of bytes that is old, zero or another record's, two words that changed
    places: the sum is another one than before, as long as the bytes are other ones."""
    words = data.draw(st.sampled_from(SIZES))
    sound, other = records_of(2, words, seed)
    copy = sound.copy()
    begin = data.draw(st.integers(0, 4 * words - 1))
    end = data.draw(st.integers(begin + 1, 4 * words))
    match data.draw(st.sampled_from(["bit", "zero", "other", "moved", "swapped"])):
        case "bit":
            copy[begin] ^= 1 << data.draw(st.integers(0, 7))
        case "zero":
            copy[begin:end] = 0
        case "other":
            copy[begin:end] = other[begin:end]
        case "moved":
            copy[:] = np.roll(copy, begin)
        case "swapped":
            as_words = copy.view(np.uint32)
            as_words[[begin // 4, (end - 1) // 4]] = as_words[[(end - 1) // 4, begin // 4]]
    before, after = sums_of(np.stack([sound, copy]), weights_of(4 * words)).tolist()
    assert (before == after) == (sound.tobytes() == copy.tobytes())


def test_banks_are_summed_whole_in_pieces_of_any_size() -> None:
    """Against each record alone; every byte is told of once. Records larger than a piece, and many in one."""
    for experts, words in ((3, PIECE_NBYTES // 4 + 1), (70, PIECE_NBYTES // 4 // 32)):
        banks = [records_of(experts, words, layer) for layer in range(2)]
        told: list[int] = []
        sums = bank_sums(banks, told.append)
        weights = weights_of(4 * words)
        assert sums.tolist() == [[int(sums_of(record[None], weights)[0]) for record in bank] for bank in banks]
        assert sum(told) == sum(bank.nbytes for bank in banks) and len(told) > 2


def test_a_stop_ends_the_summing() -> None:
    def stop(nbytes: int) -> None:
        raise RequestRefused("stopping", "")

    with pytest.raises(RequestRefused):
        bank_sums([records_of(3, 1)], stop)


def test_a_message_has_them_as_they_were() -> None:
    rng = random.Random(1)
    sums = np.array([[rng.randrange(-(2**63), 2**63) for _ in range(5)] for _ in range(3)])
    assert unpacked(packed(sums), 3, 5).tolist() == sums.tolist() and len(packed(sums)) == 8 * 15
    with pytest.raises(ValueError, match="reshape"):
        unpacked(packed(sums), 5, 5)
