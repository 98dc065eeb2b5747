"""Messages and tools as the chat template is given them. Pure."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from scheduler.chat_template import ChatTemplate
from scheduler.http.chat_requests import ChatMessage, ChatRequest, Part, Tool, ToolCall
from scheduler.http.errors import MAX_NAME_CHARS, invalid, unsupported
from scheduler.http.markers import THINK, THINK_END
from scheduler.http.output_format import Thinking
from scheduler.http.tool_calls import call_form
from scheduler.http.tool_calls_json import json_value


class ChatPrompt(Struct, frozen=True):
    """The prompt, and whether the answer to it begins with thinking."""

    text: str
    thinking: Thinking


def chat_prompt(request: ChatRequest, tools: Sequence[Tool], template: ChatTemplate) -> ChatPrompt:
    """ApiError or RequestRefused, naming the field, for what cannot be rendered."""
    continued = bool(request.continue_final_message)
    generation_prompt = request.add_generation_prompt is not False
    if continued and generation_prompt:
        raise invalid("continue_final_message needs add_generation_prompt: false", "continue_final_message")
    settings = template_settings(request, template)
    if not request.messages:
        raise invalid("messages is empty", "messages")
    messages = [message_object(message, i, template) for i, message in enumerate(request.messages)]
    objects = [tool_object(tool) for tool in tools] or None
    text = template.render(messages, objects, continued, generation_prompt, **settings)
    return ChatPrompt(text, _thinking(text, messages[-1]["content"] if continued else None, template))


def template_settings(request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    """The variables that the client sets. ApiError for one that the template does not read."""
    settings = dict(request.chat_template_kwargs or {})
    for name in settings:
        if name not in template.settings:
            read = name in template.variables
            why = "the template is given it anyway" if read else "this model's chat template does not read it"
            raise unsupported(f"chat_template_kwargs.{name[:MAX_NAME_CHARS]}", why)
    if request.reasoning_effort is not None:
        if "reasoning_effort" not in template.settings:
            raise unsupported("reasoning_effort", "this model's chat template does not read it")
        settings["reasoning_effort"] = request.reasoning_effort
    return settings


def message_object(message: ChatMessage, number: int, template: ChatTemplate) -> dict[str, Any]:
    """What templates know a message as. ApiError for what is not served."""
    where = f"messages[{number}]"
    _check(message, where)
    role = "system" if message.role == "developer" and "developer" not in template.source else message.role
    value: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        value["name"] = message.name
    if message.reasoning_content is not None:
        value["reasoning_content"] = value["thinking"] = message.reasoning_content
    if message.tool_calls:
        value["tool_calls"] = [_call(call, template) for call in message.tool_calls]
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    return value


def tool_object(tool: Tool) -> dict[str, Any]:
    """What templates know a tool as. That it is `strict` is no business of the model's."""
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def _check(message: ChatMessage, where: str) -> None:
    assistant = message.role == "assistant"
    if not assistant and message.content is None:
        raise invalid(f"{where}.content is missing", "messages")
    for name, value in (("tool_calls", message.tool_calls), ("reasoning_content", message.reasoning_content)):
        if value and not assistant:
            raise invalid(f"{where}.{name} is only for the assistant's turns", "messages")
    for name, value in (("refusal", message.refusal), ("annotations", message.annotations)):
        if value:
            raise unsupported(f"{where}.{name}", "templates have no place for it")


def _content(message: ChatMessage, where: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    return "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(message.content))


def _text(part: Part, where: str) -> str:
    if part.type != "text":
        raise unsupported(f"{where}: {part.type[:50]}", "this engine serves text alone")
    if part.text is None:
        raise invalid(f"{where}.text is missing", "messages")
    return part.text


def _call(call: ToolCall, template: ChatTemplate) -> dict[str, Any]:
    """What templates know a call as.

    Its arguments are no JSON object if the answer was cut off in them. Templates of JSON calls print them as they are;
    those of XML calls have to take them apart, and are given none.
    """
    arguments = json_value(call.function.arguments or "{}")
    if not isinstance(arguments, dict):
        arguments = {} if call_form(template.source) == "xml" else call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _thinking(text: str, continued: str | None, template: ChatTemplate) -> Thinking:
    """`continued`: the content that the answer goes on with."""
    if THINK_END not in template.source:
        return "never"
    if continued is not None:
        return "opened" if continued.rfind(THINK) > continued.rfind(THINK_END) else "never"
    end = text.rstrip()
    return "opened" if end.endswith(THINK) else "never" if end.endswith(THINK_END) else "may"
