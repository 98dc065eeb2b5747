"""Chat messages to one text, by the checkpoint's Jinja template in the environment that Hugging Face gives it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from copyengine.wire.errors import ConfigError, RequestRefused
from scheduler.template_environment import Environment

MAX_SOURCE_CHARS = 1_000_000
"""Of a template; the longest of those that the tests have is of some 20,000. Compiling takes a second for so many."""

MAX_REASON_CHARS = 500
"""Of what jinja says is wrong: it may quote the chat, which would come back whole."""

_GOES_ON = "<<here the answer goes on>> "
"""Written behind a message that is to be continued, and cut off again: its blank shows whether the template trims."""


_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""The variables that every template is given, beside the special tokens."""


class ChatTemplate:
    """A compiled template. ConfigError, naming the file `origin`, if `source` does not compile.

    A template is a program: it runs in jinja2's sandbox, nothing of it is evaluated before it is rendered, and what it
    takes then is bounded, see `template_limits`.

    `source` is its text, `origin` the file that it is of. `variables` are the names that it reads without having set
    them, or not in each of its branches; `settings` are those among them that are nothing of `render`'s own.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"{origin}: the chat template has more than {MAX_SOURCE_CHARS:,} characters")
        self._environment = environment = Environment()
        try:
            tree = environment.parse(source)
            self.variables = _undeclared(environment, tree)
            self._template = environment.compiled(tree)
        except Exception as error:  # of jinja2, or whatever Python says of the code made from it
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(f"{origin}: the chat template does not compile: {_reason(error)}{line}") from None
        self.source = source
        self.origin = origin
        self.settings = self.variables - _GIVEN - special_tokens.keys()
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        **settings: Any,
    ) -> str:
        """The prompt for the assistant's next turn. RequestRefused("invalid_request") if the template objects.

        Messages and tools are objects as OpenAI's API has them, but for the arguments of calls, which are objects too.
        With `continue_final_message` the prompt ends where the last message's content does. `settings` are values of
        further variables, see the class.
        """
        if continue_final_message:
            last = dict(messages[-1])
            messages = [*messages[:-1], last | {"content": last["content"] + _GOES_ON}]
        values = {"messages": messages, "tools": tools, "documents": None, **self._special_tokens, **settings}
        self._environment.begin()
        try:
            text = self._template.render(**values, add_generation_prompt=add_generation_prompt)
            text.encode()  # a lone surrogate can neither be tokenised nor sent
        except Exception as error:  # a template is somebody else's program: it may raise anything
            detail = f"messages: the chat template refused them: {_reason(error)}"
            raise RequestRefused("invalid_request", detail) from error
        return _cut(text) if continue_final_message else text


def _undeclared(environment: jinja2.Environment, tree: jinja2.nodes.Template) -> frozenset[str]:
    """As jinja2.meta.find_undeclared_variables, which would evaluate constants."""
    generator = jinja2.meta.TrackingCodeGenerator(environment)
    generator.optimizer = None
    generator.visit(tree)
    return frozenset(generator.undeclared_identifiers)


def _cut(text: str) -> str:
    """`text` up to the place where the answer goes on, without blanks before it if the template took those after it."""
    before, mark, _ = text.rpartition(_GOES_ON)
    if mark:
        return before
    before, mark, _ = text.rpartition(_GOES_ON.rstrip())
    if not mark:
        detail = "continue_final_message: the chat template leaves out the end of the last message"
        raise RequestRefused("invalid_request", detail)
    return before.rstrip()


def _reason(error: Exception) -> str:
    """What `error` says, as text that can be sent: the words may be the template's."""
    detail = (error.message if isinstance(error, jinja2.TemplateError) else None) or str(error) or type(error).__name__
    return detail[:MAX_REASON_CHARS].encode(errors="backslashreplace").decode()
