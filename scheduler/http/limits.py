"""The limits of requests' fields, as /openapi.json states them.

They are stated only: what is out of range the engine refuses itself, and names field and value.
"""

import math
import sys
from typing import Annotated, Any

from msgspec import Meta

from scheduler.validate import MAX_BIAS, MAX_BIASES, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS, RANGES, SEEDS


def _stated(**schema: Any) -> Meta:
    return Meta(extra_json_schema=schema)


def _range_of(name: str) -> Meta:
    """What the engine takes of a field."""
    least, most, _ = RANGES[name]
    above = {"exclusiveMinimum": 0} if least == math.ulp(0.0) else {"minimum": least}
    return _stated(**above, **({} if most == sys.float_info.max else {"maximum": most}))


Temperature = Annotated[float, _range_of("temperature")]
TopP = Annotated[float, _range_of("top_p")]
TopK = Annotated[int, _stated(minimum=-1, maximum=SEEDS - 1)]
MinP = Annotated[float, _range_of("min_p")]
Penalty = Annotated[float, _range_of("presence_penalty")]
RepetitionPenalty = Annotated[float, _range_of("repetition_penalty")]
Seed = Annotated[int, _stated(minimum=-SEEDS, maximum=SEEDS - 1)]
Choices = Annotated[int, _range_of("n")]
MaxTokens = Annotated[int, _range_of("max_tokens")]
TopLogprobs = Annotated[int, _range_of("logprobs")]
TokenId = Annotated[int, _stated(minimum=0)]
StopText = Annotated[str, _stated(minLength=1, maxLength=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], _stated(maxItems=MAX_STOPS)]
StopTokens = Annotated[list[TokenId], _stated(maxItems=MAX_STOP_TOKENS)]
Bias = Annotated[float, _stated(minimum=-MAX_BIAS, maximum=MAX_BIAS)]
Biases = Annotated[
    dict[int, Bias], _stated(maxProperties=MAX_BIASES, propertyNames={"pattern": "^(0|[1-9][0-9]{0,9})$"})
]
