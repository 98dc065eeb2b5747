"""Writes models of family Qwen3-MoE with random weights: the built-in one, and those of tests and benchmarks.

The weights are drawn so that nothing degenerates: embeddings of unit variance, projections of 1/sqrt(fan-in), a router
and a head sharp enough that routing and the next token depend on the text. The same seed gives the same bytes.
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from copyengine.checkpoint.builtin_text import TEXT
from copyengine.checkpoint.convert import NUMPY_DTYPE
from copyengine.checkpoint.directory import INDEX
from copyengine.checkpoint.model import RANDOM_WEIGHTS
from copyengine.checkpoint.names import dense_names, expert_names
from copyengine.families import parse_spec
from copyengine.families.qwen3 import FUSED, HUB
from copyengine.model_spec import ModelSpec

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MIN_TOKENIZER_VOCAB = 256 + len(SPECIAL_TOKENS)
ROUTER_SHARPNESS = 2.0
"""Standard deviation of the router's logits."""
HEAD_SHARPNESS = 3.0
"""Standard deviation of the head's logits."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Shard = list[tuple[str, tuple[int, ...]]]


class Sizes(Struct, frozen=True):
    """The geometry of a random model; the defaults are the built-in model's (101 MB of bfloat16 experts)."""

    layers: int = 8
    hidden: int = 256  # H
    intermediate: int = 128  # I
    experts: int = 64  # E; 0 makes every layer dense
    experts_per_token: int = 8  # K
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocab_size: int = 1536
    max_position: int = 8192
    dense_intermediate: int = 512
    dense_layers: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    fused_experts: bool = False
    shards: int = 2


def write_random_model(
    directory: Path,
    sizes: Sizes | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write a whole checkpoint into `directory`, which exists; returns the bytes of its weights.

    `progress` is called with the bytes of each tensor. The tokenizer is left out below 259 words of vocabulary, which
    every byte and the special tokens take; beyond some 1,600 the text it is trained on gives no more tokens, and the
    ids above have none. One shard is in memory at a time. OSError or SafetensorError if the disk is full.
    """
    sizes = sizes or Sizes()
    config = model_config(sizes, dtype)
    weight_map: dict[str, str] = {}
    total = 0
    shards = _shards(parse_spec(config), sizes)
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for source, shape in shard:
            tensors[source] = _draw(source, shape, seed, dtype)
            total += tensors[source].nbytes
            if progress:
                progress(tensors[source].nbytes)
        save_file(tensors, directory / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(directory / "config.json", config)
    if sizes.vocab_size >= MIN_TOKENIZER_VOCAB:
        _write_tokenizer(directory, sizes)
    return total


def model_config(sizes: Sizes, dtype: str = "bfloat16") -> dict[str, object]:
    """config.json of a random model, in the spelling of hub files."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        RANDOM_WEIGHTS: True,
        "torch_dtype": dtype,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.dense_intermediate,
        "moe_intermediate_size": sizes.intermediate,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(sizes.dense_layers),
        "max_position_embeddings": sizes.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": sizes.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": 2,
    }


def _shards(spec: ModelSpec, sizes: Sizes) -> list[Shard]:
    """The tensors of each shard: as many layers in each, embeddings in the first, norm and head in the last."""
    dialect = FUSED if sizes.fused_experts else HUB
    count = max(1, min(sizes.shards, sizes.layers))
    shards: list[Shard] = [[] for _ in range(count)]
    for dense in dense_names(spec, dialect):
        layer = int(dense.name.split(".")[1]) if dense.name.startswith("layers.") else 0
        last = dense.name in ("final_norm", "head")
        shards[-1 if last else layer * count // sizes.layers].append((dense.source, dense.shape))
    for expert in expert_names(spec, dialect):
        layer = spec.moe_layers[expert.bank]
        shards[layer * count // sizes.layers].append((expert.source, expert.shape))
    return shards


def _draw(source: str, shape: tuple[int, ...], seed: int, dtype: str) -> NDArray[np.generic]:
    """One tensor, from a stream of its own, so that it does not depend on the others."""
    generator = np.random.default_rng([seed, zlib.crc32(source.encode())])
    values = generator.standard_normal(shape, dtype=np.float32)
    if source.endswith("norm.weight"):
        values = 1.0 + 0.1 * values
    elif "embed_tokens" not in source:
        values *= _sharpness(source) / math.sqrt(shape[-1])
    return values.astype(NUMPY_DTYPE[dtype])


def _sharpness(source: str) -> float:
    if source.endswith("mlp.gate.weight"):
        return ROUTER_SHARPNESS
    return HEAD_SHARPNESS if source == HUB.dense["head"] else 1.0


def _write_tokenizer(directory: Path, sizes: Sizes) -> None:
    """A byte-level BPE, its chat template and the token that ends an answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    (directory / "tokenizer.json").write_bytes(tokenizer.to_str(pretty=True).encode())
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": sizes.max_position,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(directory / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_bytes((json.dumps(value, indent=2) + "\n").encode())
