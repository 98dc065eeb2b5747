"""gpt-oss' fused MXFP4 experts: records byte by byte against the hub's spelling, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.names import dense_names
from copyengine.checkpoint.reader import read_experts
from copyengine.families import parse_spec
from copyengine.families.gpt_oss import MXFP4
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from kernels.formats import RecordLayout

HIDDEN, INNER, E = 64, 32, 3
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": 9, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": E, "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
EXPERTS = "model.layers.1.mlp.experts."
Tensors = dict[str, NDArray[Any]]


def tensors() -> Tensors:
    generator = np.random.default_rng(0)
    found: Tensors = {
        entry.source: np.zeros(entry.shape, np.float32) for entry in dense_names(parse_spec(CONFIG), MXFP4)
    }
    for i in range(2):
        for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            stem = f"model.layers.{i}.mlp.experts.{name}"
            found[f"{stem}_blocks"] = generator.integers(0, 256, (E, rows, columns // 32, 16), np.uint8)
            found[f"{stem}_scales"] = generator.integers(100, 140, (E, rows, columns // 32), np.uint8)
            found[f"{stem}_bias"] = generator.standard_normal((E, rows)).astype(np.float16)
    return found


def written(directory: Path, found: Tensors) -> Path:
    save_file(found, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def read(directory: Path) -> tuple[RecordLayout, NDArray[np.uint8]]:
    model = open_model(directory)
    record = record_layout(model.spec, "bfloat16")
    assert record is not None
    banks = np.zeros((2, E, record.record_nbytes), np.uint8)
    assert read_experts(model, record, list(banks), lambda _: None) == sum(ref.nbytes for _, ref in model.experts)
    return record, banks


def test_records_are_those_of_the_files_gate_before_up(tmp_path: Path) -> None:
    """Row 2i of the files is gate's row i, row 2i + 1 up's; blocks follow one another along k."""
    found = tensors()
    record, banks = read(written(tmp_path, found))
    order = [*range(0, 2 * INNER, 2), *range(1, 2 * INNER, 2)]
    for e in range(E):

        def field(name: str, e: int = e) -> NDArray[np.uint8]:
            placed = record.field(name)
            return banks[1, e, placed.offset : placed.offset + placed.nbytes]

        def stored(name: str, e: int = e) -> NDArray[Any]:
            return np.asarray(found[EXPERTS + name][e])

        assert field("gate_up").tolist() == stored("gate_up_proj_blocks")[order].flatten().tolist()
        assert field("gate_up_scale").tolist() == stored("gate_up_proj_scales")[order].flatten().tolist()
        assert field("gate_up_bias").view(np.float32).tolist() == stored("gate_up_proj_bias")[order].tolist()
        assert field("down").tolist() == stored("down_proj_blocks").flatten().tolist()
        assert field("down_scale").tolist() == stored("down_proj_scales").flatten().tolist()
        assert field("down_bias").view(np.float32).tolist() == stored("down_proj_bias").tolist()


def test_a_config_that_does_not_say_so_is_told(tmp_path: Path) -> None:
    """Against the message's words."""
    written(tmp_path, tensors())
    config = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"gate_up_proj is missing.*gate_up_proj_blocks is there.*mxfp4"):
        open_model(tmp_path)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """A scale that is no number, one that is not there, codes of another shape or type."""
    for name, change in (
        ("gate_up_proj_scales", lambda old: np.where(np.arange(old.size).reshape(old.shape) == 5, 255, old)),
        ("down_proj_scales", None),
        ("down_proj_blocks", lambda old: old[:, :, :, :8]),
        ("gate_up_proj_blocks", lambda old: old.astype(np.float32)),
        ("gate_up_proj_bias", None),
    ):
        found = tensors()
        old = found.pop(EXPERTS + name)
        if change is not None:
            new = change(old)
            found[EXPERTS + name] = np.ascontiguousarray(new if new.dtype == np.float32 else new.astype(np.uint8))
        with pytest.raises(ConfigError, match=EXPERTS + name):
            read(written(tmp_path, found))


@pytest.mark.parametrize("sign", ["weight_scale", "weight_packed"])
def test_scales_beside_a_linear_outside_the_experts_are_refused_by_name(tmp_path: Path, sign: str) -> None:
    """Nothing says how it would be quantised: with its weight there, and without."""
    stem = "model.layers.1.self_attn.k_proj."
    found = tensors()
    found[stem + sign] = found[stem + "weight"]
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{stem}{sign} is there"):
            open_model(written(tmp_path, found))
        found.pop(stem + "weight", None)
