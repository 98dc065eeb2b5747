"""Chat messages to one text, by the checkpoint's Jinja template in the environment that Hugging Face gives it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from copyengine.wire.errors import ConfigError, RequestRefused

MAX_REPEATED = 1_000_000
MAX_POWER_BITS = 65_536
"""What `*` may repeat a sequence to, and `**` raise an integer to: one operation holds up the whole process."""

MAX_REASON_CHARS = 500

_GOES_ON = "<<here the answer goes on>> "
"""Written behind a message that is to be continued, and cut off again: its blank shows whether the template trims."""


_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""The variables that every template is given, beside the special tokens."""


class ChatTemplate:
    """A compiled template. ConfigError, naming the file `origin`, if `source` does not compile.

    A template is a program: it runs in jinja2's sandbox, nothing of it is evaluated before it is rendered, and `**` and
    `*` are bounded. Its loops are not, nor what filters and format strings make: a template that nests long
    loops occupies a thread for as long as they take.

    `source` is its text. `variables` are the names that it reads without having set them, or not in each of its
    branches; `settings` are those among them that are nothing of `render`'s own.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_as_it_is,
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
            self.variables = _undeclared(environment, tree)
        except Exception as error:  # of jinja2, or whatever Python says of the code made from it
            line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(f"{origin}: the chat template does not compile: {_reason(error)}{line}") from None
        self.source = source
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
        try:
            text = self._template.render(**values, add_generation_prompt=add_generation_prompt)
            text.encode()  # a lone surrogate can neither be tokenised nor sent
        except Exception as error:  # a template is somebody else's program: it may raise anything
            detail = f"messages: the chat template refused them: {_reason(error)}"
            raise RequestRefused("invalid_request", detail) from None
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


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """`left * right` or `left ** right`. OverflowError if the result would be too large."""
        if operator == "**":
            bits = left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
            if bits > MAX_POWER_BITS:
                raise OverflowError(f"** makes an integer of more than {MAX_POWER_BITS} bits")
        else:
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(repeated, Sequence) and times * len(repeated) > MAX_REPEATED:
                raise OverflowError(f"* makes a sequence of more than {MAX_REPEATED:,} elements")
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    """What is printed, unchanged. That it takes the context keeps jinja2 from evaluating constants while compiling."""
    return value


def _reason(error: Exception) -> str:
    """What `error` says, as text that can be sent: the words may be the template's."""
    detail = (error.message if isinstance(error, jinja2.TemplateError) else None) or str(error) or type(error).__name__
    return detail[:MAX_REASON_CHARS].encode(errors="backslashreplace").decode()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's turns for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own, does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
