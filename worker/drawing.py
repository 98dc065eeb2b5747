"""What some rows of a step want beyond a plain draw: a draw from changed logits, and log-probabilities.

All rows are drawn plainly first, in a decode step inside its graph, so that a step in which nobody wants more costs
nothing more. Rows with changed logits are then drawn anew, which costs the plain draw of theirs.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.sampling import (
    MAX_TEMPERATURE,
    AllowedTokens,
    LogitChanges,
    RowLogprobs,
    RowSampling,
    changed,
    logprobs,
    only_allowed,
    restricted,
    sample,
)
from worker.protocol import MAX_LOGPROBS, Changes, Logprobs, RunStep, Sampling
from worker.step_inputs import StepArrays, copies, settings_of

T = TypeVar("T")
OfLogits = Callable[[torch.Tensor, torch.Tensor, int], RowLogprobs]
"""kernels.sampling.logprobs, or that with a fixed order of sums."""

BLOCK_ROWS = 4
"""Rows that are taken at once: what is made of them takes some 50 bytes per row and token of the vocabulary."""


class Drawn(NamedTuple):
    """What was drawn plainly."""

    tokens: torch.Tensor  # [R] int64, -1 where the logits are not finite
    logits: torch.Tensor  # [R, V] float32
    finite: torch.Tensor | None = None  # [B] bool of the step's sequences, see worker.step.are_finite


class Extras(NamedTuple):
    """What a step's rows want beyond that; arrays on the host."""

    changed: list[list[NDArray[Any]]]  # of each block: its rows [A], those of RowSampling, LogitChanges, AllowedTokens
    told: list[int]  # rows whose log-probabilities are asked for
    counts: list[int]  # of each of them, how many likeliest tokens


def extras_of(step: RunStep, arrays: StepArrays) -> Extras | None:
    """None if no row of the step, which has been checked, wants more than a plain draw."""
    settings = settings_of(step)
    rows = [row for row, sampling in enumerate(settings) if sampling.changes is not None]
    told = {row: sampling.logprobs for row, sampling in enumerate(settings) if sampling.logprobs is not None}
    if not rows and not told:
        return None
    blocks = [_changed_block(block, settings, arrays) for block in _blocks(rows)]
    return Extras(blocks, list(told), list(told.values()))


def _changed_block(rows: Sequence[int], settings: Sequence[Sampling], arrays: StepArrays) -> list[NDArray[Any]]:
    wanted = [settings[row].changes or Changes() for row in rows]
    seen = [np.frombuffer(changes.seen, np.int32) for changes in wanted]
    index = np.arange(len(rows))
    return [
        np.array(rows, np.int64),
        *(getattr(arrays, name)[list(rows)] for name in RowSampling._fields),
        np.array([changes.repetition for changes in wanted], np.float64),
        np.array([changes.presence for changes in wanted], np.float64),
        np.array([changes.frequency for changes in wanted], np.float64),
        np.repeat(index, [len(changes.bias) for changes in wanted]),
        np.array([token for changes in wanted for token in changes.bias], np.int64),
        np.array([value for changes in wanted for value in changes.bias.values()], np.float64),
        np.repeat(index, [len(tokens) for tokens in seen]),
        np.concatenate(seen).astype(np.int64),
        np.concatenate([np.frombuffer(changes.counts, np.int32) for changes in wanted]).astype(np.int64),
        *_allowed(wanted),
    ]


def _allowed(wanted: Sequence[Changes]) -> list[NDArray[Any]]:
    """The arrays of AllowedTokens, of those rows that may not draw all."""
    own = {row: np.frombuffer(changes.allowed, np.int32) for row, changes in enumerate(wanted) if changes.allowed}
    words = np.zeros((len(own), max(map(len, own.values()), default=0)), np.int32)
    for place, values in zip(words, own.values(), strict=True):
        place[: len(values)] = values
    return [np.array(list(own), np.int64), words]


def extras_on_device(extras: Extras, device: torch.device) -> list[torch.Tensor]:
    """What `with_extras` needs of them there. Before the stream waits for copies: pinned memory may have to be
    allocated for it, for which the driver waits for the device.
    """
    told = [np.array(block, np.int64) for block in _blocks(extras.told)]
    return copies([*chain.from_iterable(extras.changed), *told], device)


def with_extras(
    drawn: Drawn, extras: Extras, on_device: Sequence[torch.Tensor], logprobs: OfLogits = logprobs
) -> torch.Tensor:
    """[W] int64: the tokens [R], then the log-probabilities as `read_logprobs` reads them. Does not wait.

    `logprobs` is that of the model's kind of operations.
    """
    tensors = iter(on_device)
    tokens = drawn.tokens
    for _ in extras.changed:
        rows = next(tensors)
        sampling = RowSampling(*islice(tensors, len(RowSampling._fields)))
        changes = LogitChanges(*islice(tensors, len(LogitChanges._fields)))
        allowed = AllowedTokens(*islice(tensors, len(AllowedTokens._fields)))
        anew = changed(drawn.logits[rows], changes)
        if allowed.row.numel():  # what is not finite may lie where nothing is allowed
            mine = _restricted_draw(anew, sampling, allowed).where(tokens[rows] >= 0, -1)
        else:
            mine = sample(anew, sampling)
        tokens = tokens.index_copy(0, rows, mine)
    words = [tokens]
    for rows in tensors:
        found = logprobs(drawn.logits[rows], tokens[rows], MAX_LOGPROBS)
        words += [found.drawn.view(torch.int64), found.ids.flatten(), found.top.view(torch.int64).flatten()]
    return torch.cat(words) if extras.told else tokens


def _restricted_draw(logits: torch.Tensor, sampling: RowSampling, allowed: AllowedTokens) -> torch.Tensor:
    """[A] int64: the tokens of a block from its changed logits [A, V]; -1 in a row that no token is allowed in."""
    sampling = sampling._replace(temperature=sampling.temperature.clamp(max=MAX_TEMPERATURE))
    return only_allowed(sample(restricted(logits, allowed), sampling), allowed)


def read_logprobs(words: Sequence[int], extras: Extras) -> Iterator[tuple[int, Logprobs]]:
    """The rows of `extras.told`, each with its log-probabilities, from the words behind the tokens."""
    values = np.array(words, np.int64)
    top = (len(values) // len(extras.told) - 1) // 2  # N: MAX_LOGPROBS, or V if that is less
    for block in _blocks(list(zip(extras.told, extras.counts, strict=True))):
        here, values = np.split(values, [len(block) * (1 + 2 * top)])
        drawn, ids, logs = np.split(here, [len(block), len(block) * (1 + top)])
        for i, (row, count) in enumerate(block):
            likeliest = slice(i * top, i * top + min(count, top))
            own = ids[likeliest].tolist(), logs.view(np.float64)[likeliest].tolist()
            yield row, Logprobs(float(drawn.view(np.float64)[i]), *own)


def _blocks(rows: Sequence[T]) -> list[Sequence[T]]:
    return [rows[first : first + BLOCK_ROWS] for first in range(0, len(rows), BLOCK_ROWS)]
