"""Dense weights against the arrays they come from."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from copyengine.budget import dense_memory_nbytes
from copyengine.checkpoint.model import dense_file_nbytes, open_model
from copyengine.checkpoint.names import dense_names, expert_names
from copyengine.families import FAMILIES, parse_spec
from copyengine.protocol import Dtype
from tests.copyengine.families.test_deepseek_v3 import DEEPSEEK_V3
from worker.weights import TORCH_DTYPES, load_dense, to_tensor

CPU = torch.device("cpu")

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}

SHAPES = {
    "model.embed_tokens": (11, 6),
    "model.norm": (6,),
    "model.layers.0.input_layernorm": (6,),
    "model.layers.0.post_attention_layernorm": (6,),
    "model.layers.0.self_attn.q_proj": (8, 6),
    "model.layers.0.self_attn.k_proj": (4, 6),
    "model.layers.0.self_attn.v_proj": (4, 6),
    "model.layers.0.self_attn.o_proj": (6, 8),
    "model.layers.0.self_attn.q_norm": (4,),
    "model.layers.0.self_attn.k_norm": (4,),
    "model.layers.0.mlp.gate_proj": (5, 6),
    "model.layers.0.mlp.up_proj": (5, 6),
    "model.layers.0.mlp.down_proj": (6, 5),
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_checkpoint_comes_back_in_the_asked_type(dtype: Dtype, tmp_path: Path) -> None:
    """Against the tensors that safetensors' own writer wrote."""
    generator = torch.Generator().manual_seed(0)
    saved = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    save_file(saved, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = open_model(tmp_path)
    heard: list[int] = []
    loaded = load_dense(model, dtype, CPU, heard.append)
    assert len(loaded) == len(saved) and sum(heard) == dense_file_nbytes(model)
    for ours, theirs in (
        ("embed", "model.embed_tokens"),
        ("layers.0.attention.k", "model.layers.0.self_attn.k_proj"),
        ("layers.0.ffn.down", "model.layers.0.mlp.down_proj"),
    ):
        assert torch.equal(loaded[ours], saved[f"{theirs}.weight"].to(TORCH_DTYPES[dtype]))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (127,), (2, 128), (129,)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_to_tensor_copies_the_values_into_aligned_memory(dtype: type, shape: tuple[int, ...]) -> None:
    """Round trip through float32, from an array that is read-only and starts on an odd element."""
    values = np.random.default_rng(0).standard_normal(int(np.prod(shape)) + 1)
    array: NDArray[np.generic] = values.astype(dtype)[1:].reshape(shape)
    array.flags.writeable = False
    tensor = to_tensor(array, CPU)
    assert tuple(tensor.shape) == shape and tensor.data_ptr() % 64 == 0
    np.testing.assert_array_equal(tensor.float().numpy(), array.astype(np.float32))


def test_what_stays_float32_is_loaded_so_and_counted_so(tmp_path: Path) -> None:
    """Against the files: the routing of DeepSeek-V3 in a bfloat16 model keeps every bit, all else is rounded."""
    config = DEEPSEEK_V3 | {"vocab_size": 8, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    config |= {"kv_lora_rank": 4, "q_lora_rank": None, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2}
    config |= {"first_k_dense_replace": 0, "moe_intermediate_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, dialect = parse_spec(config), FAMILIES["DeepseekV3ForCausalLM"].dialects[0]
    generator = np.random.default_rng(1)
    shapes = {entry.source: entry.shape for entry in dense_names(spec, dialect)}
    shapes |= {entry.source: entry.shape for entry in expert_names(spec, dialect)}
    tensors = {source: torch.from_numpy(generator.standard_normal(shape)).float() for source, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = open_model(tmp_path)
    weights = load_dense(model, "bfloat16", CPU, lambda nbytes: None)
    for entry in dense_names(spec, dialect):
        kept = torch.float32 if "score" in entry.name else torch.bfloat16
        assert weights[entry.name].dtype == kept, entry.name
        assert torch.equal(weights[entry.name], tensors[entry.source].to(kept))
    assert sum(tensor.nbytes for tensor in weights.values()) == dense_memory_nbytes(spec, "bfloat16")
