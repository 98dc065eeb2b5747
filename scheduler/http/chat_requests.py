"""What /v1/chat/completions takes."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from scheduler.http.limits import MaxTokens, TopLogprobs
from scheduler.http.sampling_fields import SamplingFields

Role = Literal["system", "developer", "user", "assistant", "tool"]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:/-]{1,128}(?!\\n)$")]
Shown = Annotated[str | None, Meta(description="shown to the model if its chat template reads it; else a label")]
Unserved = Annotated[Any, Meta(description="not served; null is taken", extra_json_schema={"type": "null"})]
Label = Annotated[Raw | UnsetType, Meta(description="a label of the client's; nothing depends on it")]
"""Not decoded: whatever it is, it costs no more than its bytes."""


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message. Only `type: "text"` is served; the other fields are known so as to be refused by name."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None
    refusal: str | None = None


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A call that was made; `arguments` is the JSON text of an object. If it is none, as an answer that was cut off
    leaves it, the model is shown it as it is or, where calls are XML, without arguments."""

    name: str
    arguments: str = ""


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A call of an assistant's turn. `index` is taken too, since clients add up streamed calls; nothing depends on it.
    The model is shown `id` if its chat template reads it."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. Clients send an assistant's turn back as they got it, so that its empty fields are taken too. The model
    is shown what its chat template reads."""

    role: Role
    content: str | list[Part] | None = None
    name: Shown = None
    reasoning_content: Annotated[
        str | None, Meta(description="what the assistant thought; many chat templates read it of the last turns only")
    ] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Shown = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionTool(Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` is the JSON schema of an object. `strict`: its calls satisfy that schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    function: FunctionTool
    type: Literal["function"] = "function"


class ChosenFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """By its name."""

    name: str


class ToolChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """The one function to call."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class JsonSchemaFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The schema binds exactly, `strict` or not; what it holds that cannot be enforced is refused."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """What the answer's content is: text, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


_CONTENT = Meta(
    extra_json_schema={
        "anyOf": [
            {"properties": {"role": {"const": "assistant"}}},
            {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
        ]
    }
)
"""Only an assistant's turn may have none."""


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Null means the same as leaving a field out."""

    messages: Annotated[list[Annotated[ChatMessage, _CONTENT]], Meta(extra_json_schema={"minItems": 1})]
    max_completion_tokens: Annotated[
        MaxTokens | None, Meta(description="what the model's length leaves, if not given")
    ] = None
    max_tokens: Annotated[MaxTokens | None, Meta(description="the older name of max_completion_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[TopLogprobs | None, Meta(description="likeliest tokens of each place to list")] = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="variables of the chat template")] = None
    reasoning_effort: Annotated[str | None, Meta(description="refused unless the chat template knows it")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Meta(description="the last message goes on; needs add_generation_prompt: false")
    ] = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: Label = UNSET
    safety_identifier: Label = UNSET
    prompt_cache_key: Label = UNSET
    functions: Unserved = None
    function_call: Unserved = None
    audio: Unserved = None
    prediction: Unserved = None
    web_search_options: Unserved = None
    verbosity: Unserved = None
    prompt_cache_retention: Unserved = None


UNSERVED = {
    "functions": "it is the older name of tools",
    "function_call": "it is the older name of tool_choice",
    "audio": "this engine serves text alone",
    "prediction": "this engine takes no guesses of the answer",
    "web_search_options": "this engine searches nothing",
    "verbosity": "no chat template reads it",
    "prompt_cache_retention": "prompts are cached as long as there is room",
}
"""Why the fields are not served that OpenAI's clients know, and may send as null."""
