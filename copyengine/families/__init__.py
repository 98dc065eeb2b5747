"""Model families, a file each: config.json -> ModelSpec, and the names of the tensors.

A further family is a further file here and a row in the table; and in `worker/model`, if it is put together otherwise
than those there, a file and a row too.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from copyengine.checkpoint.keys import Keys, show
from copyengine.families.deepseek_v3 import DEEPSEEK_V3
from copyengine.families.expert_scheme import expert_scheme
from copyengine.families.family import Family
from copyengine.families.gpt_oss import GPT_OSS
from copyengine.families.mixtral import MIXTRAL
from copyengine.families.olmoe import OLMOE
from copyengine.families.qwen2_moe import QWEN2_MOE
from copyengine.families.qwen3 import QWEN3, QWEN3_MOE
from copyengine.families.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from copyengine.families.qwen3_next import QWEN3_NEXT
from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import ConfigError

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": QWEN3_MOE,
        "Qwen3ForCausalLM": QWEN3,
        "Qwen2MoeForCausalLM": QWEN2_MOE,
        "MixtralForCausalLM": MIXTRAL,
        "OlmoeForCausalLM": OLMOE,
        "Qwen3NextForCausalLM": QWEN3_NEXT,
        "Qwen3_5MoeForCausalLM": QWEN3_5_MOE_TEXT,
        "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
        "GptOssForCausalLM": GPT_OSS,
        "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    }
)
"""By architecture, as config.json names it."""


def parse_spec(config: Keys) -> ModelSpec:
    """The model that a config.json describes, in either spelling of its keys (hub files' or transformers 5's).

    ConfigError names the key, its value and the fix; nothing else is raised, whatever `config` holds.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    spec = family.parse(architecture, config)
    scheme = expert_scheme(config, spec, family)
    if scheme is None:
        return spec
    return replace(spec, expert_format=replace(spec.expert_format, name=scheme.format, block=scheme.block))


def _architecture(config: Keys) -> str:
    names = config.get("architectures")
    known = f"known: {', '.join(FAMILIES)}"
    if names is None:
        model_type = config.get("model_type")
        for architecture, family in FAMILIES.items():
            if family.model_type == model_type:
                return architecture
        raise ConfigError(f"config.json: architectures is missing and model_type is {show(model_type)}; {known}")
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in FAMILIES:
                return name
    raise ConfigError(f"config.json: architectures {show(names)} is not supported; {known}")
