"""Witness: transformers' own models on tiny random checkpoints.

A script, run in a process of its own as `python -I transformers_oracle.py DIRECTORY`, because transformers probes for
a PyPI package called `kernels`, which ours would pass for. For each case it writes DIRECTORY/<case>/ (a checkpoint as
transformers saves it) and DIRECTORY/<case>.npz; and for each rope case an entry of DIRECTORY/rope.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 37
NEW_TOKENS = 16

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "norm_topk_prob": True,
}

CASES: dict[str, dict[str, Any]] = {
    "e8_k1": {"num_experts": 8, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "e60_k2_tied": {"num_experts": 60, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    "e128_k8_sharded": {"num_experts": 128, "num_experts_per_tok": 8},
    "dense_layer_between": {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "every_second_layer": {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
    "dense": {"tie_word_embeddings": True},
    "windows": {"num_experts": 8, "num_experts_per_tok": 2, "use_sliding_window": True, "sliding_window": 11},
    "dense_windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "biases": {"num_experts": 8, "num_experts_per_tok": 2, "attention_bias": True},
    "yarn": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
        },
    },
}

FAMILIES: dict[str, str] = {
    "qwen2_moe": "Qwen2Moe",
    "qwen2_moe_mixed": "Qwen2Moe",
    "qwen2_moe_windows": "Qwen2Moe",
    "mixtral": "Mixtral",
    "mixtral_windows": "Mixtral",
    "gpt_oss": "GptOss",
    "gpt_oss_otherwise": "GptOss",
    "gpt_oss_mxfp4": "GptOss",
    "olmoe": "Olmoe",
    "olmoe_clipped": "Olmoe",
    "qwen3_next": "Qwen3Next",
    "qwen3_next_mixed": "Qwen3Next",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_moe": "Qwen3_5Moe",
    "deepseek_v3": "DeepseekV3",
    "deepseek_v3_plain": "DeepseekV3",
}
"""Of the cases that are not Qwen3's: how transformers' classes begin."""

SHARED = {"shared_expert_intermediate_size": 48, "norm_topk_prob": False}
CASES |= {
    "qwen2_moe": SHARED | {"num_experts": 12, "num_experts_per_tok": 4},
    "qwen2_moe_mixed": SHARED
    | {"num_experts": 12, "num_experts_per_tok": 4, "mlp_only_layers": [1], "qkv_bias": False},
    "qwen2_moe_windows": SHARED
    | {"num_experts": 12, "num_experts_per_tok": 4, "use_sliding_window": True, "sliding_window": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "mixtral_windows": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 7},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 9},
    "gpt_oss_mxfp4": {"num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 9},
    "gpt_oss_otherwise": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 33,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "attention_bias": False,
        "swiglu_limit": 1.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False},
    "olmoe_clipped": {"num_experts": 16, "num_experts_per_tok": 4, "clip_qkv": 0.8, "attention_bias": True},
}

DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 48,
    "initializer_range": 0.1,  # more, and transformers' own chunked and recurrent forms differ by more than 1e-4
}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
CASES |= {
    "qwen3_next": DELTA,
    "qwen3_next_mixed": DELTA
    | {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "mlp_only_layers": [1],
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": DELTA | {"norm_topk_prob": None},
    "qwen3_5_moe": DELTA | {"norm_topk_prob": None},
}
WITH_TOWER = ("qwen3_5_moe",)
RECURRENT = tuple(name for name in CASES if name.startswith(("qwen3_next", "qwen3_5_moe")))
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
CASES |= {
    "deepseek_v3": LATENT
    | {
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "mscale": 0.8,
            "mscale_all_dim": 1.3,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v3_plain": LATENT
    | {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
    },
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_beta": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.3,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 4096,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "attention_factor": 0.9,
        "original_max_position_embeddings": 1024,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def hide_our_packages() -> None:
    """Drops what an editable install adds to the import system; fails if a `kernels` is still found."""
    import importlib.util

    root = Path(__file__).resolve().parents[2]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_editable(finder)]
    sys.path_hooks[:] = [hook for hook in sys.path_hooks if not _is_editable(hook)]
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != root]
    sys.path_importer_cache.clear()
    if importlib.util.find_spec("kernels") is not None:
        raise SystemExit("a package called kernels is still importable: transformers would take it for another one")


def _is_editable(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("__editable__")


def write_case(directory: Path, name: str, overrides: dict[str, Any]) -> None:
    """Saves the checkpoint and, as fp32, the prompt, its greedy continuation and the logits at every position."""
    import numpy as np
    import torch

    torch.manual_seed(sum(name.encode()) + 1)
    settings = BASE | overrides
    model = _model(name, settings)
    with torch.no_grad():
        for key, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key:  # initialised to ones, which would hide a norm that is left out or swapped
                weight.uniform_(0.5, 1.5)
            if "bias" in key:  # initialised to zeros
                weight.normal_(std=0.3)
            if "sinks" in key:  # as large as scores are, so that one left out shows
                weight.normal_(mean=1.0, std=1.0)
    model.set_experts_implementation(
        "eager"
    )  # the plainest of its ways: another one gave gpt-oss other logits with torch 2.11
    codes = draw_mxfp4(model) if "mxfp4" in name else {}
    model.eval().save_pretrained(directory / name, max_shard_size="300KB" if "sharded" in name else "5GB")
    if codes:
        put_mxfp4(directory / name, codes)
    ids = torch.randint(0, settings["vocab_size"], (1, PROMPT_TOKENS))
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        logits = model(ids).logits
    np.savez(directory / f"{name}.npz", ids=ids[0].numpy(), logits=logits[0].numpy())


def _model(name: str, settings: dict[str, Any]) -> Any:
    import transformers

    family = FAMILIES.get(name, "Qwen3Moe" if "num_experts" in settings else "Qwen3")
    if name in WITH_TOWER:
        config = getattr(transformers, f"{family}Config")(text_config=settings, vision_config=TOWER)
        return getattr(transformers, f"{family}ForConditionalGeneration")(config)
    kind = f"{family}TextConfig" if name.endswith("_text") else f"{family}Config"
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, kind)(**settings))


def draw_mxfp4(model: Any) -> dict[str, Any]:
    """Gives gpt-oss' experts weights that MXFP4 has (OCP MX: E2M1 times powers of two), and returns their blocks [E, N,
    K/32, 16] and scales [E, N, K/32] by their names on the hub."""
    import torch

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    codes = {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = weight.shape
            drawn = torch.randint(0, 16, (experts, rows, columns // 32, 32), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8)
            matrix = values[drawn.long()] * torch.exp2(scales.float() - 127)[..., None]
            weight.data = matrix.flatten(2).transpose(1, 2).contiguous()
            codes[f"{name}_blocks"] = drawn[..., 0::2] | drawn[..., 1::2] << 4
            codes[f"{name}_scales"] = scales
    return codes


def put_mxfp4(directory: Path, codes: dict[str, Any]) -> None:
    """Writes `codes` into the saved checkpoint in place of the weights, as the hub's are."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    dense = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in codes}
    save_file(dense | codes, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps(config))


def rope_goldens() -> dict[str, Any]:
    """Per rope case: its parameters, head_dim, and the inverse frequencies and attention factor of transformers."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    goldens = {}
    for name, parameters in ROPES.items():
        config = Qwen3MoeConfig(**(BASE | {"rope_parameters": dict(parameters), "head_dim": 64}))
        rotary = Qwen3MoeRotaryEmbedding(config)
        goldens[name] = {
            "parameters": parameters,
            "head_dim": 64,
            "inverse_frequencies": rotary.inv_freq.tolist(),
            "attention_factor": float(rotary.attention_scaling),
        }
    return goldens


def main() -> None:
    directory = Path(sys.argv[1])
    os.environ["HF_HUB_OFFLINE"] = "1"
    hide_our_packages()
    import torch

    torch.set_num_threads(1)  # tiny models: a second one would mostly be waited for
    for name, overrides in CASES.items():
        write_case(directory, name, overrides)
    (directory / "rope.json").write_text(json.dumps(rope_goldens()))


if __name__ == "__main__":
    main()
