"""Whether an answer begins with thinking, against templates and hand-written chats."""

from typing import Any

import msgspec
import pytest

from scheduler.chat_template import ChatTemplate
from scheduler.http.chat_prompt import chat_prompt
from scheduler.http.chat_requests import ChatRequest
from tests.scheduler.chat_templates import JSON_CALLS, XML_CALLS

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
FIRST = "{# </think> #}{{ messages[0].content }}"
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def thinking(template: str, content: str = "hi", role: str = "user", **fields: Any) -> str:
    request = msgspec.convert({"messages": [{"role": role, "content": content}], **fields}, ChatRequest)
    return chat_prompt(request, [], ChatTemplate(template, {}, "x")).thinking


@pytest.mark.parametrize(
    ("template", "fields", "expected"),
    [
        (JSON_CALLS, {}, "may"),
        (JSON_CALLS, QUIET, "never"),
        (XML_CALLS, {}, "opened"),
        (XML_CALLS, QUIET, "never"),
        ("{{ messages[0].content }}", {"content": "<think>"}, "never"),
        (JSON_CALLS, {"content": "<think>"}, "may"),
        (JSON_CALLS, {"role": "assistant", "content": "so", **CONTINUED}, "never"),
        (FIRST, {"role": "assistant", "content": "<think>so", **CONTINUED}, "opened"),
        (FIRST, {"content": "<think>a</think>so", **CONTINUED}, "never"),
    ],
)  # fmt: skip
def test_whether_the_answer_thinks(template: str, fields: dict[str, Any], expected: str) -> None:
    assert thinking(template, **fields) == expected
