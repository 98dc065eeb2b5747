"""A quantised checkpoint served: against the same engine on a float32 checkpoint of the dequantised weights.

With the real slot pool and copier over shared memory, S a little above E, so that layers take each other's slots.
Greedy tokens are compared, and the hidden states and logits of the prompt as bits: on the host a quantised weight is
brought to float32 exactly as the other checkpoint's were.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from copyengine.checkpoint.input_scales import read_input_scales
from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.quantise import quantise_checkpoint
from copyengine.checkpoint.random_model import write_random_model
from copyengine.checkpoint.schemes import COMPRESSED_TENSORS, MODELOPT
from copyengine.protocol import ExpertActivations
from copyengine.records import record_layout
from kernels.grouped_gemm import InputScales
from tests.copyengine.checkpoint.quantised_files import write_checkpoint
from tests.copyengine.checkpoint.spelt_linears import PACKED_W4A4, SIZES, SPELLINGS, Spelling, spelt
from tests.worker.resident_experts import CPU, read_banks
from tests.worker.test_host_slots import Rig
from worker.geometry import SlotGeometry
from worker.host_experts import HostExperts
from worker.kv import KvCache
from worker.model import build_model
from worker.protocol import Mode, RunStep, Sampling, SequenceStep
from worker.step import StepRunner
from worker.weights import load_dense

TOKENS, PAGE_TOKENS = 8, 16
PROMPT_IDS = torch.randint(0, SIZES.vocab_size, (24,), generator=torch.Generator().manual_seed(0)).tolist()


DIALECTS: dict[str, tuple[Spelling, str]] = {
    "modelopt": (SPELLINGS["modelopt nvfp4"], "input_scale"),
    "compressed-tensors": (PACKED_W4A4, "input_global_scale"),
}
"""And the suffixes of their scales of activations."""


class Answer(NamedTuple):
    tokens: list[int]
    prompt_bits: list[torch.Tensor]  # hidden states and logits


def pages(tokens: int) -> list[int]:
    return list(range(-(-tokens // PAGE_TOKENS)))


def answer(
    directory: Path,
    mode: Mode,
    activations: ExpertActivations = "plain",
    tokens: int = TOKENS,
    prompt: Sequence[int] = PROMPT_IDS,
) -> Answer:
    """Prefill of `prompt` in `mode`, then greedy decoding of `tokens` in all, in float32."""
    model = open_model(directory, expert_activations=activations)
    scales = [InputScales(*pair) for pair in read_input_scales(model, lambda _: None)]
    record, moe = record_layout(model.spec, "float32"), model.spec.moe
    assert record is not None and moe is not None
    rig = Rig(SlotGeometry(len(model.spec.moe_layers), moe.experts, record.record_nbytes, moe.experts + 1, max_query=5))
    try:
        rig.banks = [bank.reshape(-1) for bank in read_banks(model, record)]
        rig.slots.pool_bytes[:] = 0xFF
        rig.attach()
        kv = KvCache(model.spec, 8, PAGE_TOKENS, torch.float32, CPU)
        experts = HostExperts(rig.slots, torch.from_numpy(rig.slots.pool_bytes), record, moe.experts, scales)
        decoder = build_model(model.spec, load_dense(model, "float32", CPU, lambda _: None), kv, experts)
        runner = StepRunner(model.spec, decoder, kv, rig.slots)
        full = runner.run_full(RunStep(mode, [SequenceStep(0, list(prompt), 0, pages(len(prompt)), Sampling())]))
        answered = list(full.result.tokens)
        for position in range(len(prompt), len(prompt) + tokens - 1):
            step = RunStep("decode", [SequenceStep(0, answered[-1:], position, pages(position + 1), Sampling())])
            answered += runner.run(step).tokens
        return Answer(answered, [full.hidden, full.logits])
    finally:
        rig.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write_random_model(directory, SIZES, dtype="float32")
    return directory


@pytest.mark.parametrize(
    "name",
    ["modelopt nvfp4", "packed mxfp4", "fp8 block", "fp8 tensor", "fp8 tensor of transformers", "packed fp8 channel"],
)
def test_the_answers_are_those_of_the_dequantised_weights(source: Path, tmp_path: Path, name: str) -> None:
    """All linears quantised, the experts' and those of attention, dense layers and head."""
    made = spelt(source, json.loads((source / "config.json").read_text()), SPELLINGS[name])
    quantised = write_checkpoint(tmp_path / "quantised", made.config, made.tensors)
    plain = {key: value for key, value in made.config.items() if key != "quantization_config"}
    expected = answer(write_checkpoint(tmp_path / "exact", plain, made.plain), "streamed")
    assert len(set(expected.tokens)) > TOKENS // 2
    modes: tuple[tuple[Mode, int], ...] = (("demand", TOKENS), ("streamed", 1))
    for mode, tokens in modes:
        found = answer(quantised, mode, tokens=tokens)
        assert found.tokens == expected.tokens[:tokens]
        assert all(torch.equal(*pair) for pair in zip(found.prompt_bits, expected.prompt_bits, strict=True))
    assert not torch.equal(answer(source, "demand", tokens=1).prompt_bits[1], expected.prompt_bits[1])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_activations_are_rounded_under_the_layer_s_scales(source: Path, tmp_path: Path, dialect: str) -> None:
    """The same bits on demand and streamed, near those of weights alone; one expert's scale is that of its layer."""
    spelling, suffix = DIALECTS[dialect]
    made = spelt(source, json.loads((source / "config.json").read_text()), spelling)
    experts = [stem for stem in made.matrices if ".experts." in stem]

    def written(name: str, largest: float) -> Path:
        scales = dict.fromkeys(experts, 4.0 / (6 * 448)) | {experts[0]: largest / (6 * 448)}
        stored = {stem: 1 / scale if "global" in suffix else scale for stem, scale in scales.items()}
        inputs = {f"{stem}.{suffix}": torch.tensor([scale]) for stem, scale in stored.items()}
        return write_checkpoint(tmp_path / name, made.config, made.tensors | inputs)

    directory = written("small", 4.0)
    plain = answer(directory, "demand", tokens=1)
    rounded = [answer(directory, mode, "w4a4", tokens=2) for mode in ("demand", "streamed")]
    assert rounded[0].tokens == rounded[1].tokens
    assert all(torch.equal(*pair) for pair in zip(rounded[0].prompt_bits, rounded[1].prompt_bits, strict=True))
    error = (rounded[0].prompt_bits[0] - plain.prompt_bits[0]).norm() / plain.prompt_bits[0].norm()
    assert 0.01 < error < 0.3
    other = answer(written("large", 1e4), "demand", "w4a4", tokens=1)
    assert not torch.equal(other.prompt_bits[0], rounded[0].prompt_bits[0])


def test_both_dialects_give_the_same_answers_where_their_globals_agree(source: Path, tmp_path: Path) -> None:
    """Globals that are powers of two have exact reciprocals: the records are then the same bytes."""
    scaled = tmp_path / "scaled"
    scaled.mkdir()
    shutil.copy(source / "config.json", scaled)
    tensors = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor[0, 0] = 2.0**-9 * 6 * 448 / 2  # by far the largest: the global is 2**-10
            assert tensor.abs().max() == tensor[0, 0]
    save_file(tensors, scaled / "model.safetensors")
    answers = []
    for name, scheme in {"modelopt": MODELOPT, "compressed-tensors": COMPRESSED_TENSORS}.items():
        quantise_checkpoint(scaled, tmp_path / name, scheme)
        answers.append(answer(tmp_path / name, "demand"))
    assert answers[0].tokens == answers[1].tokens
    assert all(torch.equal(*pair) for pair in zip(answers[0].prompt_bits, answers[1].prompt_bits, strict=True))
