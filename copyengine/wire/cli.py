"""Command-line flags from config Structs: one flag per field, its default read from the Struct.

A field's description is its `msgspec.Meta(description=...)`; further spellings are in
`extra_json_schema={"aliases": [...]}`.
"""

import argparse
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from copyengine.wire.errors import ConfigError

S = TypeVar("S", bound=Struct)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        text = message.encode(errors="backslashreplace").decode()  # what of a flag is no text can neither be sent
        raise ConfigError(f"{text} (see {self.prog} --help)")


def parser_for(config: type[Struct], prog: str) -> argparse.ArgumentParser:
    """A parser with one `--field-name` flag per field of `config`."""
    parser = _Parser(prog=prog, description=(config.__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    hints = get_type_hints(config, include_extras=True)
    for field in msgspec.structs.fields(config):
        hint, meta = _unwrap(hints[field.name])
        aliases = (meta.extra_json_schema or {}).get("aliases", []) if meta else []
        default = field.default
        text = (meta.description or "") if meta else ""
        if default not in (msgspec.NODEFAULT, None, "") and hint is not bool:
            text = f"{text} (default {default})"
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if hint is bool:
            options["action"] = "store_true"
        else:
            options["required"] = default is msgspec.NODEFAULT
            options["metavar"] = _metavar(hint)
        parser.add_argument(f"--{field.name.replace('_', '-')}", *aliases, **options)
    return parser


def parse(config: type[S], argv: Sequence[str] | None, prog: str) -> S:
    """The config that `argv` states. ConfigError names the flag and the value that are wrong."""
    stated = vars(parser_for(config, prog).parse_args(argv))
    for name, value in stated.items():
        if isinstance(value, str) and value != value.encode("utf-8", "replace").decode():  # lone surrogates
            raise ConfigError(f"--{name.replace('_', '-')} {value!a}: is not valid UTF-8 text")
    try:
        return msgspec.convert(stated, config, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        for name, value in stated.items():
            if re.search(rf"\$\.{name}\b", text):  # a name may begin like another one
                reason = text.split(" - at")[0].replace("`", "")
                choices = _metavar(_unwrap(get_type_hints(config, include_extras=True)[name])[0])
                raise ConfigError(f"--{name.replace('_', '-')} {value}: {reason} (takes {choices})") from None
        raise ConfigError(text) from None


def to_argv(config: Struct) -> list[str]:
    """The flags that state `config`: `parse(type(config), to_argv(config), ...) == config`."""
    argv: list[str] = []
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if value is True:
            argv.append(flag)
        elif value is not False and value is not None and value != field.default:
            argv.append(f"{flag}={value}")
    return argv


def _unwrap(hint: Any) -> tuple[Any, Meta | None]:
    if get_origin(hint) is Annotated:
        base, *rest = get_args(hint)
        return base, next((m for m in rest if isinstance(m, Meta)), None)
    return hint, None


def _metavar(hint: Any) -> str:
    args = get_args(hint)
    if get_origin(hint) is Literal:
        return "|".join(map(str, args))
    if args:
        return "|".join(dict.fromkeys(_metavar(_unwrap(a)[0]) for a in args if a is not type(None)))
    return {int: "N", float: "X", str: "TEXT"}.get(hint, "VALUE")
