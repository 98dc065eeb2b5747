"""What a chat asks for, worked out: its prompt, the grammar of its answer, and how that is read. Pure."""

from collections.abc import Mapping, Sequence

from scheduler.chat_template import ChatTemplate
from scheduler.http.chat_answer import ChatAnswer
from scheduler.http.chat_prompt import chat_prompt
from scheduler.http.chat_requests import UNSERVED, ChatRequest, Tool, ToolChoice
from scheduler.http.errors import MAX_NAME_CHARS, ApiError, invalid, unsupported
from scheduler.http.markers import FUNCTION, THINK_END
from scheduler.http.output_format import WantedCalls, answer_grammar, answer_schema, check_schema
from scheduler.http.reasoning import ReasoningSplitter
from scheduler.http.tool_calls import ToolCallParser, call_form
from scheduler.http.tool_calls_json import JsonToolCalls
from scheduler.http.tool_calls_xml import XmlToolCalls
from scheduler.http.tool_schema import ToolSchema


class ChatPlan:
    """ApiError or RequestRefused, naming the field, for what is not served. `grammar` is "" if any answer will do."""

    def __init__(self, request: ChatRequest, template: ChatTemplate, added_tokens: Mapping[str, int]) -> None:
        """`added_tokens`: see TextCodec."""
        for name, why in UNSERVED.items():
            if getattr(request, name) is not None:
                raise unsupported(name, why)
        self._tools = offered(request)
        self._calls = wanted_calls(request, self._tools, template)
        tools = [tool.function for tool in self._tools] if self._calls and self._calls.form == "xml" else []
        self._arguments = {tool.name: ToolSchema(tool.parameters).arguments() for tool in tools}
        self._thinks = THINK_END in template.source
        self._prompt = chat_prompt(request, self._tools, template)
        schema = answer_schema(request.response_format)
        self.grammar = answer_grammar(schema, self._calls, self._prompt.thinking, added_tokens)

    @property
    def prompt(self) -> str:
        """The rendered chat."""
        return self._prompt.text

    def reader(self) -> ChatAnswer:
        """Reads one answer."""
        xml = self._calls is not None and self._calls.form == "xml"
        opened = self._prompt.thinking == "opened"
        splitter = ReasoningSplitter(opened, FUNCTION if xml else "") if self._thinks else None
        return ChatAnswer(splitter, self._parser())

    def _parser(self) -> ToolCallParser | None:
        if self._calls is None:
            return None
        if self._calls.form == "json":
            return JsonToolCalls()
        return XmlToolCalls(self._arguments)


def offered(request: ChatRequest) -> Sequence[Tool]:
    """The tools that the model is told of: none if it may call none."""
    tools = request.tools or []
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            raise invalid(f"tools[{i}] is a second function {name!r}", "tools")
        names.add(name)
        check_schema(tool.function.parameters or {}, f"tools[{i}].function.parameters")
    return [] if request.tool_choice == "none" else tools


def wanted_calls(request: ChatRequest, tools: Sequence[Tool], template: ChatTemplate) -> WantedCalls | None:
    """Which calls the answer may or must have; None if it is to have none."""
    choice = request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    form = call_form(template.source)
    if "tools" not in template.variables or form is None:
        raise _no_tools("tools" in template.variables)
    several = request.parallel_tool_calls is not False
    if isinstance(choice, ToolChoice):
        return WantedCalls([_chosen(choice, tools)], form, must=True, several=False)
    return WantedCalls(tools, form, choice == "required", several)


def _chosen(choice: ToolChoice, tools: Sequence[Tool]) -> Tool:
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    raise invalid(f"tool_choice names {choice.function.name[:MAX_NAME_CHARS]!r}, which is none of tools", "tool_choice")


def _no_tools(known: bool) -> ApiError:
    if known:
        return unsupported("tools", "the form in which this model writes calls is none that is known here")
    return unsupported("tools", "this model's chat template has no place for them")
