"""How answers are drawn where a request does not say: as the checkpoint's generation_config.json does."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from copyengine.checkpoint.directory import json_object, read_text
from copyengine.wire.errors import ConfigError


class DefaultSampling(Struct, frozen=True):
    """OpenAI's defaults, but for what a checkpoint states. See protocol.Sampling."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0


def read_default_sampling(directory: Path) -> DefaultSampling:
    """As vLLM takes it: its other fields, `do_sample` too, change nothing. ConfigError for values that are none."""
    path = directory / "generation_config.json"
    text = read_text(path)
    stated = {} if text is None else json_object(text, str(path))
    try:
        return msgspec.convert({key: value for key, value in stated.items() if value is not None}, DefaultSampling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
