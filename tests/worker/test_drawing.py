"""Rows that want more than a plain draw, against each row drawn alone from logits changed by hand."""

import math

import msgspec
import numpy as np
import pytest
import torch

from kernels.sampling import MAX_TEMPERATURE, RowSampling, sample
from worker.drawing import BLOCK_ROWS, Drawn, extras_of, extras_on_device, read_logprobs, with_extras
from worker.protocol import MAX_LOGPROBS, Changes, ExpertStats, Logprobs, RunStep, Sampling, SequenceStep, StepDone
from worker.step_inputs import StepInputs, on_device, pack, packed_nbytes, step_arrays, views

VOCAB = 60
WORDS = 2
CPU = torch.device("cpu")


def changes(seen: dict[int, int] | None = None, bias: dict[int, float] | None = None, **penalties: float) -> Changes:
    """`seen`: token -> how often it was generated."""
    seen = seen or {}
    ids, counts = (np.array(list(values), np.int32).tobytes() for values in (seen.keys(), seen.values()))
    return msgspec.structs.replace(Changes(seen=ids, counts=counts, bias=bias or {}), **penalties)


def only(tokens: set[int], words: int = WORDS) -> bytes:
    """The mask that allows these, of so many words."""
    return sum(1 << token for token in tokens).to_bytes(4 * words, "little")


def step_of(settings: list[Sampling | None]) -> RunStep:
    return RunStep("decode", [SequenceStep(i, [1], 0, [i], s) for i, s in enumerate(settings)])


def inputs_of(step: RunStep) -> StepInputs:
    return on_device(step, step_arrays(step, 1), CPU)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(settings: list[Sampling | None], logits: torch.Tensor) -> tuple[list[int], dict[int, Logprobs]]:
    """Tokens and log-probabilities by row; `logits` [R, V] of the sequences that draw."""
    step = step_of(settings)
    arrays = step_arrays(step, 1)
    plain = sample(logits, on_device(step, arrays, CPU).sampling)
    extras = extras_of(step, arrays)
    if extras is None:
        return plain.tolist(), {}
    words: list[int] = with_extras(Drawn(plain, logits), extras, extras_on_device(extras, CPU)).tolist()
    rows = len(logits)
    return words[:rows], dict(read_logprobs(words[rows:], extras)) if extras.told else {}


def by_hand(logits: torch.Tensor, wanted: Changes) -> torch.Tensor:
    row = logits.tolist()
    for token, value in wanted.bias.items():
        row[token] = float(np.float32(row[token] + value))
    counts = np.frombuffer(wanted.counts, np.int32).tolist()
    for token, count in zip(np.frombuffer(wanted.seen, np.int32).tolist(), counts, strict=True):
        logit = row[token] / wanted.repetition if row[token] > 0 else row[token] * wanted.repetition
        row[token] = logit - wanted.frequency * count - wanted.presence * (count > 0)
    if wanted.allowed:
        bits = int.from_bytes(wanted.allowed, "little")
        row = [logit if bits >> token & 1 else -math.inf for token, logit in enumerate(row)]
    return torch.tensor(row)


def by_elimination(logits: torch.Tensor, sampling: RowSampling) -> int:
    """What is drawn when only the tokens with a logit above minus infinity are there."""
    left = torch.isfinite(logits).nonzero()[:, 0]
    return int(left[sample(logits[None, left], sampling)]) if len(left) else -1


def kinds(seed: int) -> list[Sampling]:
    """Settings of every kind."""
    warm = Sampling(temperature=1.0, seed=seed, min_p=0.01, top_k=30)
    penalised = changes({3: 2, 7: 0, seed % VOCAB: 5}, {9: 6.0, 4: -100.0}, repetition=1.7, presence=0.5, frequency=0.3)
    return [
        Sampling(),
        Sampling(changes=penalised, logprobs=2),
        msgspec.structs.replace(warm, changes=penalised),
        msgspec.structs.replace(warm, logprobs=0),
        msgspec.structs.replace(warm, changes=changes(bias={8: 3.0}), logprobs=MAX_LOGPROBS),
        msgspec.structs.replace(warm, changes=changes({11: 1}, presence=2.0)),
        Sampling(logprobs=1, changes=Changes(allowed=only({seed % VOCAB, 8, 59}))),
        msgspec.structs.replace(warm, changes=msgspec.structs.replace(penalised, allowed=only({2, 3, 5, 7, 30}, 1))),
        msgspec.structs.replace(warm, top_p=0.8, logprobs=0, changes=Changes(allowed=only({*range(9, 50)}))),
    ]


@pytest.mark.parametrize("rows", [1, 2, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 6 * BLOCK_ROWS])
def test_each_row_is_drawn_as_it_is_alone_from_logits_changed_by_hand(rows: int) -> None:
    """Tokens are equal; log-probabilities are those of the logits before they were changed. Of a row that may draw some
    tokens only the others are taken out, so that nothing can be drawn of them."""
    settings = [kinds(row)[(row + rows) % len(kinds(row))] for row in range(rows)]
    logits = logits_of(rows, rows)
    tokens, told = draw([*settings], logits)
    sampling = inputs_of(step_of([*settings])).sampling
    for row, wanted in enumerate(settings):
        mine = by_hand(logits[row], wanted.changes or Changes())
        alone = type(sampling)(*(column[row : row + 1] for column in sampling))
        assert tokens[row] == by_elimination(mine, alone)
        assert (row in told) == (wanted.logprobs is not None)
        if wanted.logprobs is not None:
            expected = torch.log_softmax(logits[row].double(), dim=0)
            order = torch.sort(expected, descending=True, stable=True).indices[: wanted.logprobs].tolist()
            assert told[row].ids == order
            assert told[row].drawn == pytest.approx(float(expected[tokens[row]]), abs=1e-12)
            assert told[row].top == pytest.approx(expected[order].tolist(), abs=1e-12)


def test_a_row_that_draws_nothing_shifts_nothing() -> None:
    """Against the same rows without it."""
    settings = kinds(5)
    logits = logits_of(len(settings))
    assert draw([None, *settings[:3], None, *settings[3:]], logits) == draw([*settings], logits)


def test_changes_that_are_off_draw_what_a_plain_row_draws() -> None:
    """Against the plain draw, greedy and warm."""
    off = changes({token: token % 3 for token in range(VOCAB)})
    plain = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_p=0.9, seed=4)] * 4
    logits = logits_of(12)
    changed = [msgspec.structs.replace(sampling, changes=off) for sampling in plain]
    assert draw([*changed], logits)[0] == draw([*plain], logits)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_forces_and_forbids_a_token(temperature: float) -> None:
    """Against what the words say of -100 and 100."""
    logits = logits_of(20)
    forced = [Sampling(temperature, seed=i, changes=changes(bias={17: 100.0})) for i in range(20)]
    assert draw([*forced], logits)[0] == [17] * 20
    best = logits.argmax(dim=1).tolist()
    forbidden = [Sampling(temperature, seed=i, changes=changes(bias={best[i]: -100.0})) for i in range(20)]
    assert all(token != best[i] for i, token in enumerate(draw([*forbidden], logits)[0]))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300, 1e34, 1e36, 1.7e308])
def test_what_is_not_allowed_is_never_drawn(temperature: float) -> None:
    """Against the masks, whatever the temperature, and a bias that wants something else. Hot rows draw all that is
    allowed; a row that nothing is allowed in draws nothing."""
    masks = [{3, 31, 32, 59}, set(range(VOCAB)), {40}, set[int](), {0}]
    settings = [
        Sampling(temperature, seed=i, top_k=20 * (i % 2), changes=changes(bias={5: 100.0}))
        for i in range(40 * len(masks))
    ]
    for i, sampling in enumerate(settings):
        assert sampling.changes
        allowed = msgspec.structs.replace(sampling.changes, allowed=only(masks[i % len(masks)]))
        settings[i] = msgspec.structs.replace(sampling, changes=allowed)
    tokens, _ = draw([*settings], logits_of(1).expand(len(settings), -1))
    for i, mask in enumerate(masks):
        drawn = set(tokens[i :: len(masks)])
        assert drawn <= (mask or {-1})
        assert i != 0 or temperature <= 1 or drawn == mask


def test_no_temperature_above_the_largest_draws_otherwise() -> None:
    """Against rows that nothing is forbidden in, which keep their temperature."""
    for temperature in (MAX_TEMPERATURE, 1e40, 1e300):
        plain = [Sampling(temperature, seed=i, changes=changes(bias={3: 1.0})) for i in range(100)]
        whole = only(set(range(VOCAB)))
        masked = [
            msgspec.structs.replace(s, changes=msgspec.structs.replace(s.changes or Changes(), allowed=whole))
            for s in plain
        ]
        assert draw([*masked], logits_of(100))[0] == draw([*plain], logits_of(100))[0]


def test_a_row_without_finite_logits_has_no_token_whatever_is_changed() -> None:
    """Against the docstring; its neighbours draw as ever. Nor if the fault is where no token is allowed."""
    logits = logits_of(9)
    tokens, _ = draw([*kinds(1)], logits)
    logits[1, 4] = float("nan")
    logits[5, 40] = float("inf")
    logits[6, 8] = float("nan")
    logits[7, 40] = float("-inf")
    damaged, told = draw([*kinds(1)], logits)
    assert damaged == [tokens[0], -1, *tokens[2:5], -1, -1, -1, tokens[8]]
    assert sorted(told) == [1, 3, 4, 6, 8] and told[4].drawn == pytest.approx(
        float(torch.log_softmax(logits[4].double(), dim=0)[tokens[4]])
    )


def test_what_rows_want_travels_in_one_copy() -> None:
    """Against the arrays before they were packed as for a device; many are empty."""
    step = step_of([*kinds(3), Sampling(changes=Changes(presence=1.0))])
    extras = extras_of(step, step_arrays(step, 1))
    assert extras
    arrays = [array for block in extras.changed for array in block]
    packed = torch.full((packed_nbytes(arrays),), 0xFF, dtype=torch.uint8)
    pack(arrays, packed)
    for tensor, array in zip(views(packed, arrays), arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert not tensor.numel() or tensor.data_ptr() % 64 == packed.data_ptr() % 64


def test_a_vocabulary_smaller_than_what_is_asked_for() -> None:
    """Against its size."""
    logits = logits_of(1)[:, :7]
    _, told = draw([Sampling(logprobs=20)], logits)
    assert sorted(told[0].ids) == list(range(7))


def test_what_is_not_asked_for_takes_no_room_on_the_wire() -> None:
    """Against an empty map; and what is asked for comes back as it was."""
    assert len(msgspec.msgpack.encode(Sampling())) == 1
    assert b"logprobs" not in msgspec.msgpack.encode(StepDone([1], ExpertStats()))
    for sampling in kinds(2):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=Sampling) == sampling
