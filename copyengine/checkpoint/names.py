"""How checkpoint files spell the tensors of a ModelSpec: a `Dialect` is a table of names, and says all of it."""

from collections.abc import Container, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from copyengine.checkpoint.rearrange import AS_IT_IS, Order
from copyengine.checkpoint.schemes import FP8, FP8_INV, Kind, Scheme, beside
from copyengine.checkpoint.spellings import PREFIXES, respelt
from copyengine.checkpoint.tensors import Shape, dense_tensors
from copyengine.model_spec import ModelSpec, MoeSpec
from kernels.formats import layout


class ExpertTensor(Struct, frozen=True):
    """What the tensors of one name are to the experts: part `part` of `parts` equal ones of a record's field.

    In `source`, {i} is the layer and {e} the expert. Without {e} it is one tensor of all experts of a layer, with a
    leading dimension E. Where experts are quantised, a Scheme derives the names of a linear's tensors from its `source`
    and their fields from `field`, unless the Dialect is of a scheme itself.
    """

    source: str
    field: str  # of kernels.formats
    part: int = 0
    parts: int = 1
    kind: Kind = "weight"
    order: Order = AS_IT_IS


class Dialect(Struct, frozen=True):
    """The names of one way to write a checkpoint."""

    dense: Mapping[str, str]  # canonical name -> name in the files; {i} is the layer in both
    experts: tuple[ExpertTensor, ...]
    scheme: Scheme | None = None  # that the experts' tensors are of, if the table itself names those of that scheme


def under_all_prefixes(dialects: Sequence[Dialect]) -> tuple[Dialect, ...]:
    """`dialects`, each with its names under every prefix of spellings.PREFIXES: first all as they are written."""
    anew = (under_prefix(dialect, at) for at in range(len(PREFIXES)) for dialect in dialects)
    return (*dialects, *(dialect for dialect in anew if dialect not in dialects))


def under_prefix(dialect: Dialect, at: int) -> Dialect:
    """`dialect` with its names under the prefix `at` of spellings.PREFIXES."""

    def name(source: str) -> str:
        known = respelt(source)
        return known[at] if len(known) == len(PREFIXES) else source

    rows = tuple(replace(row, source=name(row.source)) for row in dialect.experts)
    return Dialect({canonical: name(source) for canonical, source in dialect.dense.items()}, rows, dialect.scheme)


class DenseName(Struct, frozen=True):
    """One tensor that is kept whole: its canonical name, its name in the files, its shape."""

    name: str
    source: str
    shape: Shape


class ExpertName(Struct, frozen=True):
    """One tensor in the files that fills part `part` of `parts` of a field: of expert `expert`, or of every expert of
    the bank (a tensor with a leading dimension E) if that is None."""

    bank: int
    expert: int | None
    field: str
    part: int
    parts: int
    source: str
    shape: Shape
    kind: Kind = "weight"
    order: Order = AS_IT_IS


def dialect_of(
    spec: ModelSpec, dialects: Sequence[Dialect], sources: Container[str], scheme: Scheme | None = None
) -> Dialect:
    """The first dialect that spells the embedding and the first expert like the tensors `sources`; the first of all if
    none does, for the message's sake. Only dialects count that spell experts of the scheme."""

    def fits(dialect: Dialect) -> bool:
        expert = next(expert_names(spec, dialect, scheme), None)
        return dialect.dense["embed"] in sources and (expert is None or expert.source in sources)

    known = [dialect for dialect in dialects if spells(dialect, scheme)]
    return next(filter(fits, known), (known or dialects)[0])


def spelt_scheme(spec: ModelSpec, dialect: Dialect, sources: Container[str], scheme: Scheme | None) -> Scheme | None:
    """`scheme`, or FP8_INV in place of FP8 if the first expert is written so: a config.json does not say which."""
    if scheme != FP8:
        return scheme
    first = next(expert_names(spec, dialect, scheme)).source
    return FP8_INV if beside(first, FP8_INV.tensors[-1].suffix) in sources else scheme


def spells(dialect: Dialect, scheme: Scheme | None) -> bool:
    """Whether `dialect` has names for experts that are quantised by `scheme`, or not at all if that is None."""
    if dialect.scheme or scheme is None or not scheme.tensors:
        return dialect.scheme == scheme
    return names_linears(dialect)


def names_linears(dialect: Dialect) -> bool:
    """Every expert's linears have a `...weight` of their own, so that a Scheme can derive names from it."""
    return all("{e}" in row.source and beside(row.source, "x") for row in dialect.experts)


def dense_names(spec: ModelSpec, dialect: Dialect) -> Iterator[DenseName]:
    """Every tensor of `spec` but the experts."""
    for name, layer, shape in dense_tensors(spec):
        yield DenseName(name.format(i=layer), dialect.dense[name].format(i=layer), shape)


def expert_names(spec: ModelSpec, dialect: Dialect, scheme: Scheme | None = None) -> Iterator[ExpertName]:
    """Every expert tensor of `spec`, bank by bank; those of experts quantised by `scheme`, of a dialect that names
    their linears, linear by linear."""
    scheme = scheme or dialect.scheme
    for bank, i in enumerate(spec.moe_layers):
        moe = spec.layers[i].ffn
        assert isinstance(moe, MoeSpec)
        plain = replace(spec.expert_format, name=spec.checkpoint_dtype, block=(0, 0), quantised_inputs=False)
        stored = replace(plain, name=scheme.format, block=scheme.block) if scheme else plain
        record = layout(stored, spec.hidden, moe.intermediate)
        for row, expert in _expert_rows(dialect.experts, moe.experts):
            source = row.source.format(i=i, e=expert)
            for name, field, kind in _tensors(source, row, scheme):
                shape = row.order.stored(_part_shape(record.field(field).shape, row.parts))
                shape = shape if expert is not None else (moe.experts, *shape)
                yield ExpertName(bank, expert, field, row.part, row.parts, name, shape, kind, row.order)


def input_names(spec: ModelSpec, dialect: Dialect, scheme: Scheme | None) -> Iterator[ExpertName]:
    """The activations' scale of each linear of each expert, if they are rounded; of a dialect that names linears."""
    if scheme is None or not spec.expert_format.quantised_inputs:
        return
    for bank, i in enumerate(spec.moe_layers):
        moe = spec.layers[i].ffn
        assert isinstance(moe, MoeSpec)
        for row, expert in _expert_rows(dialect.experts, moe.experts):
            name = beside(row.source.format(i=i, e=expert), scheme.input_scale)
            yield ExpertName(bank, expert, row.field, 0, 1, name, (1,), scheme.input_kind)


def _tensors(source: str, row: ExpertTensor, scheme: Scheme | None) -> list[tuple[str, str, Kind]]:
    """(name in the files, field, kind) of each tensor of the linear that is called `source` if it is not quantised."""
    if scheme is None or not scheme.tensors:
        return [(source, row.field, row.kind)]
    return [(beside(source, tensor.suffix), row.field + tensor.field, tensor.kind) for tensor in scheme.tensors]


def _expert_rows(rows: Sequence[ExpertTensor], experts: int) -> Iterator[tuple[ExpertTensor, int | None]]:
    """Each row with each expert, or with None if its tensors hold all of them."""
    single = [row for row in rows if "{e}" in row.source]
    yield from ((row, expert) for expert in range(experts) for row in single)
    yield from ((row, None) for row in rows if row not in single)


def _part_shape(shape: Shape, parts: int) -> Shape:
    """The leading dimension is what is divided."""
    return shape if parts == 1 else (shape[0] // parts, *shape[1:])
