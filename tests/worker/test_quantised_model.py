"""A quantised checkpoint served: against the same engine on a float32 checkpoint of the dequantised weights.

With the real slot pool and copier over shared memory, S a little above E, so that layers take each other's slots.
Greedy tokens are compared, and the hidden states and logits of the prompt as bits: on the host a quantised weight is
brought to float32 exactly as the other checkpoint's were.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.quantise import quantise_checkpoint
from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.records import record_layout
from kernels.quant import Nvfp4, dequant
from tests.worker.resident_experts import CPU, read_banks
from tests.worker.test_host_slots import Rig
from worker.geometry import SlotGeometry
from worker.host_experts import HostExperts
from worker.kv import KvCache
from worker.model import build_model
from worker.protocol import Mode, RunStep, Sampling, SequenceStep
from worker.step import StepRunner
from worker.weights import load_dense

SIZES = Sizes(
    layers=3, hidden=64, intermediate=32, experts=12, experts_per_token=3, heads=4, kv_heads=2, head_dim=16,
    vocab_size=200, dense_intermediate=48, dense_layers=(1,),
)  # fmt: skip
PROMPT, TOKENS, PAGE_TOKENS = 40, 24, 16


class Answer(NamedTuple):
    tokens: list[int]
    prompt_bits: list[torch.Tensor]  # hidden states and logits


def pages(tokens: int) -> list[int]:
    return list(range(-(-tokens // PAGE_TOKENS)))


def answer(directory: Path, mode: Mode) -> Answer:
    """Prefill of a prompt in `mode`, then greedy decoding, in float32."""
    model = open_model(directory)
    record, moe = record_layout(model.spec, "float32"), model.spec.moe
    assert record is not None and moe is not None
    rig = Rig(SlotGeometry(len(model.spec.moe_layers), moe.experts, record.record_nbytes, moe.experts + 1, max_query=5))
    try:
        rig.banks = [bank.reshape(-1) for bank in read_banks(model, record)]
        rig.slots.pool_bytes[:] = 0xFF
        rig.attach()
        kv = KvCache(model.spec, 8, PAGE_TOKENS, torch.float32, CPU)
        experts = HostExperts(rig.slots, torch.from_numpy(rig.slots.pool_bytes), record, moe.experts)
        decoder = build_model(model.spec, load_dense(model, "float32", CPU, lambda _: None), kv, experts)
        runner = StepRunner(model.spec, decoder, kv, rig.slots)
        prompt = torch.randint(0, SIZES.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
        full = runner.run_full(RunStep(mode, [SequenceStep(0, prompt, 0, pages(PROMPT), Sampling())]))
        tokens = list(full.result.tokens)
        for position in range(PROMPT, PROMPT + TOKENS - 1):
            step = RunStep("decode", [SequenceStep(0, tokens[-1:], position, pages(position + 1), Sampling())])
            tokens += runner.run(step).tokens
        return Answer(tokens, [full.hidden, full.logits])
    finally:
        rig.close()


def dequantised(quantised: Path, target: Path) -> Path:
    """The ModelOpt checkpoint `quantised` with float32 weights instead of the quantised ones, by safetensors' own
    reader and writer and kernels.quant."""
    target.mkdir()
    tensors = {name: tensor for path in quantised.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for stem in [name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2")]:
        matrix = Nvfp4(*(tensors.pop(f"{stem}.{suffix}") for suffix in ("weight", "weight_scale", "weight_scale_2")))
        tensors[f"{stem}.weight"] = dequant(matrix).float()
    save_file(tensors, target / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    write_random_model(directory, SIZES, dtype="float32")
    return directory


def test_the_answers_are_those_of_the_dequantised_weights(source: Path, tmp_path: Path) -> None:
    quantise_checkpoint(source, tmp_path / "quantised", shard_nbytes=50_000)
    exact = dequantised(tmp_path / "quantised", tmp_path / "exact")
    expected = answer(exact, "streamed")
    assert len(set(expected.tokens)) > TOKENS // 2
    modes: tuple[Mode, ...] = ("demand", "streamed")
    for directory in (tmp_path / "quantised", exact):
        for mode in modes:
            found = answer(directory, mode)
            assert found.tokens == expected.tokens
            assert all(torch.equal(*pair) for pair in zip(found.prompt_bits, expected.prompt_bits, strict=True))
    assert not torch.equal(answer(source, "demand").prompt_bits[1], expected.prompt_bits[1])


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
    for dialect in ("modelopt", "compressed-tensors"):
        quantise_checkpoint(scaled, tmp_path / dialect, dialect)
        answers.append(answer(tmp_path / dialect, "demand"))
    assert answers[0].tokens == answers[1].tokens
    assert all(torch.equal(*pair) for pair in zip(answers[0].prompt_bits, answers[1].prompt_bits, strict=True))
