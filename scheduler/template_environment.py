"""The environment that chat templates run in: jinja2's sandbox, with what Hugging Face adds to it, within limits."""

import json
import threading
from collections.abc import Callable, MappingView
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from scheduler.template_limits import Allowance, limited

COMPARING = (
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
)
"""Tests (`is eq(x)`) that do what operators do."""


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Nothing of a template is evaluated before it is rendered; what it does then is charged to `begin`'s allowance."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_printed,
        )
        self._run = threading.local()
        self.filters["tojson"] = _tojson
        for name, function in self.filters.items():
            skipped = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0
            self.filters[name] = limited(name, function, self.allowance, skipped)
        for name in COMPARING:
            self.tests[name] = self._comparing(self.tests[name])
        del self.globals["lipsum"]  # makes as much text as it is told to
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def begin(self) -> None:
        """A rendering begins in this thread."""
        self._run.allowance = Allowance()

    def allowance(self) -> Allowance:
        """Of this thread's rendering."""
        run: Allowance = self._run.allowance
        return run

    def compiled(self, tree: jinja2.nodes.Template) -> jinja2.Template:
        """The template of `tree`, which is changed so that loops, macros, joined texts and comparisons are charged."""
        bodies: list[jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock] = [
            *tree.find_all(jinja2.nodes.For),
            *tree.find_all(jinja2.nodes.Macro),
            *tree.find_all(jinja2.nodes.CallBlock),
        ]
        for node in bodies:
            texts = (text for part in node.body for text in part.find_all(jinja2.nodes.TemplateData))
            turn = _call("turn", jinja2.nodes.Const(1 + sum(len(text.data) for text in texts)))
            node.body.insert(0, jinja2.nodes.ExprStmt(turn))
        _replace(tree)
        return self.from_string(tree)

    def turn(self, chars: int) -> None:
        """A loop or a macro begins once more, with so many characters of the template's own in it."""
        self.allowance().charge(chars)

    def joined(self, *values: Any) -> str:
        """`a ~ b`."""
        self.allowance().expect(self.allowance().spelt(values))
        made: str = self.allowance().made("".join(map(str, values)))
        return made

    def compared(self, value: Any) -> Any:
        """`value`, which is about to be compared."""
        if isinstance(value, list | tuple | dict | MappingView):
            self.allowance().spelt(value)
        return value

    def _comparing(self, test: Any) -> Any:
        return lambda *operands: test(*map(self.compared, operands))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """OverflowError if the result would be too large."""
        run = self.allowance()
        match operator:
            case "**":
                run.expect_power(left, right)
            case "*":
                run.expect_product(left, right)
            case "%" if isinstance(left, str | bytes):
                run.expect_format(left, right)
            case "+" if isinstance(left, str | list | tuple):
                run.expect(len(left) + (len(right) if hasattr(right, "__len__") else 0))
        return run.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Likewise; also TimeoutError."""
        run = __self.allowance()
        owner = getattr(__obj, "__self__", None)
        if owner is __self:  # what `compiled` has put in
            return __obj(*args)
        if isinstance(owner, str | bytes | int | list | tuple):
            if __obj.__name__ == "join":
                args = tuple(map(run.drained, args))
            run.expect_call(__obj.__name__, owner, [*args, *kwargs.values()])
        return run.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `format_map`, within the allowance."""
        form = super().wrap_str_format(value)
        if form is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            self.allowance().expect_format(value.__self__, [*args, *kwargs.values()])
            return form(*args, **kwargs)

        return formatted

    def sliced(self, value: Any) -> Any:
        """`a[b:c]`."""
        return self.allowance().made(value)


def _replace(node: jinja2.nodes.Node) -> None:
    """Have `~` and comparisons below `node` go through the environment."""
    for child in node.iter_child_nodes():
        _replace(child)
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, field, [_replaced(one) for one in value])
        else:
            setattr(node, field, _replaced(value))


def _replaced(node: Any) -> Any:
    if isinstance(node, jinja2.nodes.Concat):
        return _call("joined", *node.nodes)
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice):
        return _call("sliced", node)
    if isinstance(node, jinja2.nodes.Compare):
        node.expr = _call("compared", node.expr)
        for operand in node.ops:
            operand.expr = _call("compared", operand.expr)
    return node


def _call(method: str, *arguments: jinja2.nodes.Expr) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


@jinja2.pass_context
def _printed(context: jinja2.runtime.Context, value: Any) -> Any:
    """What is printed, unchanged. That it takes the context keeps jinja2 from evaluating constants while compiling."""
    environment = context.environment
    assert isinstance(environment, Environment)
    run = environment.allowance()
    run.charge(len(value) if isinstance(value, str) else run.spelt(value))
    return value


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
