"""How the experts of a model are quantised: one way for all of them, since all records have one layout."""

from collections.abc import Iterator

from copyengine.checkpoint.keys import Keys
from copyengine.checkpoint.names import names_linears
from copyengine.checkpoint.schemes import WEIGHT, Scheme
from copyengine.families.family import Family
from copyengine.families.quantisation import quantisation, unsupported
from copyengine.model_spec import ModelSpec


def expert_scheme(config: Keys, spec: ModelSpec, family: Family) -> Scheme | None:
    """How the files spell the experts of `spec`; None if they are not quantised, or there are none.

    ConfigError for a quantisation that is not known, and for experts of more than one.
    """
    stated = quantisation(config)
    if stated is None:
        return None
    schemes = {name: scheme for name in _linears(spec, family) if (scheme := stated.scheme_of(name)) is not None}
    first = next(iter(schemes), None)
    for name, scheme in schemes.items():
        if first is not None and scheme != schemes[first]:
            raise unsupported(f"({first} as {schemes[first].name}, {name} as {scheme.name})")
    return None if first is None else schemes[first]


def _linears(spec: ModelSpec, family: Family) -> Iterator[str]:
    """Names of the linears of each layer's first expert and its last one; of what holds all, if they have none."""
    dialect = next(filter(names_linears, family.dialects), family.dialects[0])
    for i in spec.moe_layers:
        for expert in (0, spec.moe.experts - 1 if spec.moe else 0):
            for row in dialect.experts:
                yield row.source.format(i=i, e=expert).removesuffix(f".{WEIGHT}")
