"""Changed logits against the definitions of OpenAI and CTRL, token by token in Python's floats."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.sampling import FORBIDDEN, AllowedTokens, LogitChanges, changed, only_allowed, restricted

VOCAB = 12
NUMBERS = st.floats(-8, 8, width=32)
COUNTS = st.dictionaries(st.integers(0, VOCAB - 1), st.integers(0, 5), max_size=8)
BIASES = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5)
PENALTIES = st.tuples(st.floats(0.01, 10), st.floats(-2, 2), st.floats(-2, 2))
ROWS = st.lists(
    st.tuples(st.lists(NUMBERS, min_size=VOCAB, max_size=VOCAB), PENALTIES, COUNTS, BIASES), min_size=1, max_size=4
)
Row = tuple[list[float], tuple[float, float, float], dict[int, int], dict[int, float]]


def by_the_words(row: Row) -> list[float]:
    logits, (repetition, presence, frequency), counts, biases = row
    out = []
    for token, logit in enumerate(logits):
        if token in biases:
            logit = float(np.float32(logit + biases[token]))
        if token in counts:
            logit = logit / repetition if logit > 0 else logit * repetition
            logit = logit - frequency * counts[token] - (presence if counts[token] else 0.0)
        out.append(float(np.float32(logit)))
    return out


def changes_of(rows: list[Row]) -> LogitChanges:
    seen = [(i, token, count) for i, row in enumerate(rows) for token, count in row[2].items()]
    biases = [(i, token, value) for i, row in enumerate(rows) for token, value in row[3].items()]

    def column(entries: list[tuple[int, int, float]] | list[tuple[int, int, int]], place: int) -> torch.Tensor:
        return torch.tensor([entry[place] for entry in entries], dtype=torch.int64)

    repetition, presence, frequency = (
        torch.tensor(values, dtype=torch.float64) for values in zip(*(row[1] for row in rows), strict=True)
    )
    return LogitChanges(
        repetition,
        presence,
        frequency,
        column(biases, 0),
        column(biases, 1),
        torch.tensor([value for _, _, value in biases], dtype=torch.float64),
        column(seen, 0),
        column(seen, 1),
        column(seen, 2),
    )


@given(ROWS)
def test_every_logit_is_what_the_definitions_say(rows: list[Row]) -> None:
    logits = torch.tensor([row[0] for row in rows])
    before = logits.clone()
    out = changed(logits, changes_of(rows))
    assert out.tolist() == [by_the_words(row) for row in rows]
    assert torch.equal(logits, before), "the model's logits are left alone"


@given(ROWS)
def test_penalties_that_are_off_change_no_bit(rows: list[Row]) -> None:
    """Against the logits themselves, the sign of zero included."""
    off: list[Row] = [(logits, (1.0, 0.0, 0.0), counts, {}) for logits, _, counts, _ in rows]
    logits = torch.tensor([row[0] for row in rows])
    assert torch.equal(changed(logits, changes_of(off)).view(torch.int32), logits.view(torch.int32))


def test_logits_of_fewer_bits_are_widened() -> None:
    """Against the same in float32."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rows: list[Row] = [(row, (1.3, 0.5, 0.25), {1: 2, 3: 0}, {3: -4.0}) for row in logits.tolist()]
    out = changed(logits, changes_of(rows))
    assert out.dtype == torch.float32 and torch.equal(out, changed(logits.float(), changes_of(rows)))


def allowed_of(masks: dict[int, set[int]], words: int) -> AllowedTokens:
    """`masks`: row -> its tokens."""
    bits = [sum(1 << token for token in tokens).to_bytes(4 * words, "little") for tokens in masks.values()]
    table = np.frombuffer(b"".join(bits), np.int32).reshape(len(masks), words if masks else 0)
    return AllowedTokens(torch.tensor(list(masks), dtype=torch.int64), torch.tensor(table.copy()))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 63, 64, 65, 130])
@pytest.mark.parametrize("words", [1, 2, 3, 5])
def test_only_what_a_mask_names_keeps_its_logit(vocab: int, words: int) -> None:
    """Against sets of tokens: masks that reach less far than the vocabulary, or further."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    everything = set(range(32 * words))
    masks = {
        3: {token for token in everything if token % 3},
        0: everything,
        4: set[int](),
        2: {0, 30, 31} | {32 * words - 1},
    }
    allowed = allowed_of(masks, words)
    out = restricted(logits, allowed)
    for row in range(5):
        mask = masks.get(row, set(range(vocab)))
        assert out[row].tolist() == [
            logit if token in mask else FORBIDDEN for token, logit in enumerate(logits[row].tolist())
        ]
        for token in (-1, *range(vocab)):
            tokens = torch.full((5,), token)
            assert only_allowed(tokens, allowed)[row] == (token if token in mask else -1)


@pytest.mark.gpu
def test_the_device_forbids_what_the_host_forbids() -> None:
    """Against the CPU, bit for bit."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 151_936, generator=generator) * 5
    words = torch.randint(-(2**31), 2**31, (3, 4740), generator=generator).to(torch.int32)
    allowed = AllowedTokens(torch.tensor([3, 0, 1]), words)
    there = AllowedTokens(*(column.cuda() for column in allowed))
    assert torch.equal(restricted(logits.cuda(), there).cpu(), restricted(logits, allowed))
    tokens = torch.randint(-1, 151_936, (4,), generator=generator)
    assert torch.equal(only_allowed(tokens.cuda(), there).cpu(), only_allowed(tokens, allowed))


@pytest.mark.gpu
def test_the_device_changes_what_the_host_changes() -> None:
    """Against the CPU, bit for bit."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 32_000, generator=generator) * 5
    seen = {token: token % 4 for token in range(0, VOCAB * 2000, 7)}
    rows: list[Row] = [([], (1.1 + i, 0.3 * i, 0.7), seen, {i: 2.5, 31_999: -7.1}) for i in range(4)]
    changes = changes_of(rows)
    on_device = changed(logits.cuda(), LogitChanges(*(column.cuda() for column in changes)))
    assert torch.equal(on_device.cpu(), changed(logits, changes))
