"""Chat messages to one text, by the checkpoint's Jinja template in the environment that Hugging Face gives it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from copyengine.wire.errors import ConfigError, RequestRefused

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise about the messages it is given; any of them ends one request."""


class ChatTemplate:
    """A compiled template. ConfigError, naming the file `origin`, if `source` does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            where = f"{origin}: the chat template does not compile"
            raise ConfigError(f"{where}: {error.message} (line {error.lineno})") from None
        except (RecursionError, SyntaxError, ValueError) as error:  # what Python says of the code made from it
            raise ConfigError(f"{origin}: the chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for the assistant's next turn. RequestRefused("invalid_request") if the template objects."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except _RENDER_ERRORS as error:
            raise RequestRefused("invalid_request", f"messages: the chat template refused them: {error}") from None


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
