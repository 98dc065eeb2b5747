"""What a RunStep may ask for. Pure but for its types."""

import math

import numpy as np

from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import RequestRefused
from worker.kv import KvCache
from worker.protocol import MAX_LOGPROBS, Changes, Mode, RunStep, Sampling, SequenceStep


def check_step(step: RunStep, spec: ModelSpec, kv: KvCache, state_slots: int = 0) -> None:
    """RequestRefused("invalid_request") unless every token, position, page, state and setting of the step is possible.

    `state_slots` are the recurrent states that there is room for; 0 of a model that has none.
    """
    for sequence in step.sequences:
        why = _fault(sequence, step.mode, spec, kv) or _state_fault(sequence, state_slots)
        if why:
            raise RequestRefused("invalid_request", f"sequence {sequence.sequence}: {why}")
    if len({sequence.sequence for sequence in step.sequences}) < len(step.sequences):
        raise RequestRefused("invalid_request", "a sequence appears twice in a step")
    written = [page for sequence in step.sequences for page in sequence.pages[sequence.start // kv.page_tokens :]]
    if len(set(written)) < len(written):
        raise RequestRefused("invalid_request", "two sequences would write to the same KV page")
    if state_slots:
        _check_states(step.sequences)


def _check_states(sequences: list[SequenceStep]) -> None:
    """RequestRefused unless each state slot is written once, and none is that another sequence starts from."""
    written = [slot for sequence in sequences for slot in (sequence.state, *(slot for _, slot in sequence.snapshots))]
    if len(set(written)) < len(written):
        raise RequestRefused("invalid_request", "a state slot would be written twice")
    if not {sequence.restore for sequence in sequences}.isdisjoint(written):
        raise RequestRefused("invalid_request", "a state would be restored from a slot that the step writes")


def _fault(sequence: SequenceStep, mode: Mode, spec: ModelSpec, kv: KvCache) -> str | None:
    """What is wrong with one sequence's part of a step, or None."""
    length = sequence.start + len(sequence.tokens)
    needed = -(-length // kv.page_tokens)
    if not sequence.tokens or (mode == "decode" and len(sequence.tokens) != 1):
        return f"a {mode} step cannot have {len(sequence.tokens)} new tokens"
    if sequence.start < 0 or length > spec.max_position:
        return f"positions {sequence.start} .. {length - 1} are outside the model's 0 .. {spec.max_position - 1}"
    if not 0 <= min(sequence.tokens) <= max(sequence.tokens) < spec.vocab_size:
        return f"token ids must be in 0 .. {spec.vocab_size - 1}"
    if len(sequence.pages) != needed:
        return f"{length} positions take {needed} pages of {kv.page_tokens}, not {len(sequence.pages)}"
    if not 0 <= min(sequence.pages) <= max(sequence.pages) < kv.num_pages:
        return f"KV pages must be in 0 .. {kv.num_pages - 1}"
    if len(set(sequence.pages)) < len(sequence.pages):
        return "a KV page appears twice"
    return None if sequence.sample is None else _sampling_fault(sequence.sample, spec.vocab_size)


def _state_fault(sequence: SequenceStep, state_slots: int) -> str | None:
    """What is wrong with the recurrent states that one sequence names, or None."""
    if not state_slots:
        named = sequence.state != -1 or sequence.restore != -1 or sequence.snapshots
        return "this model has no recurrent state, so none can be named" if named else None
    read = [] if sequence.restore == -1 else [sequence.restore]
    slots = [sequence.state, *read, *(slot for _, slot in sequence.snapshots)]
    if not 0 <= min(slots) <= max(slots) < state_slots:
        return f"state slots must be in 0 .. {state_slots - 1}, not {slots}"
    if read and sequence.start == 0:
        return "a sequence starts from zeros, so that nothing can be restored at position 0"
    end = sequence.start + len(sequence.tokens)
    for position, _ in sequence.snapshots:
        if not sequence.start < position <= end:
            return f"a snapshot must be at positions {sequence.start + 1} .. {end}, not {position}"
    return None


def _sampling_fault(sampling: Sampling, vocab_size: int) -> str | None:
    if not 0 <= sampling.temperature < float("inf"):
        return f"temperature must be finite and not negative, not {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p must be in (0, 1], not {sampling.top_p}"
    if not 0 <= sampling.top_k < 2**63:
        return f"top_k must be in 0 .. 2**63 - 1, not {sampling.top_k}"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p must be in [0, 1], not {sampling.min_p}"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        return f"logprobs must be in 0 .. {MAX_LOGPROBS}, not {sampling.logprobs}"
    return None if sampling.changes is None else _changes_fault(sampling.changes, vocab_size)


def _changes_fault(changes: Changes, vocab_size: int) -> str | None:
    numbers = (changes.repetition, changes.presence, changes.frequency, *changes.bias.values())
    if not all(map(math.isfinite, numbers)) or changes.repetition <= 0:
        return "penalties and biases must be finite, and repetition positive"
    if len(changes.seen) != len(changes.counts) or len(changes.seen) % 4:
        return f"seen has {len(changes.seen)} bytes and counts {len(changes.counts)}: must be as many words"
    words = -(-vocab_size // 32)
    if len(changes.allowed) % 4 or len(changes.allowed) > 4 * words:
        return f"allowed has {len(changes.allowed)} bytes: must be at most {words} words of 4"
    seen = np.frombuffer(changes.seen, np.int32)
    if seen.size and int(np.frombuffer(changes.counts, np.int32).min()) < 0:
        return "counts of seen tokens must not be negative"
    ids = [*changes.bias, *((int(seen.min()), int(seen.max())) if seen.size else ())]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        return f"ids of changed logits must be in 0 .. {vocab_size - 1}"
    return None
