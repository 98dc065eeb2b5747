"""How checkpoint files spell the tensors of a ModelSpec: a `Dialect` is a table of names, and says all of it."""

from collections.abc import Container, Iterator, Mapping, Sequence

from msgspec import Struct

from copyengine.checkpoint.tensors import Shape, dense_tensors
from copyengine.model_spec import ModelSpec, MoeSpec
from kernels.formats import layout


class ExpertTensor(Struct, frozen=True):
    """What the tensors of one name are to the experts: part `part` of `parts` equal ones of a record's field.

    In `source`, {i} is the layer and {e} the expert. Without {e} it is one tensor of all experts of a layer, with a
    leading dimension E.
    """

    source: str
    field: str  # of kernels.formats: "gate_up" or "down"
    part: int = 0
    parts: int = 1


class Dialect(Struct, frozen=True):
    """The names of one way to write a checkpoint."""

    dense: Mapping[str, str]  # canonical name -> name in the files; {i} is the layer in both
    experts: tuple[ExpertTensor, ...]


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


def dialect_of(spec: ModelSpec, dialects: Sequence[Dialect], sources: Container[str]) -> Dialect:
    """The first dialect that spells the embedding and the first expert like the tensors `sources`; the first of all if
    none does, for the message's sake."""

    def fits(dialect: Dialect) -> bool:
        expert = next(expert_names(spec, dialect), None)
        return dialect.dense["embed"] in sources and (expert is None or expert.source in sources)

    return next(filter(fits, dialects), dialects[0])


def dense_names(spec: ModelSpec, dialect: Dialect) -> Iterator[DenseName]:
    """Every tensor of `spec` but the experts."""
    for name, layer, shape in dense_tensors(spec):
        yield DenseName(name.format(i=layer), dialect.dense[name].format(i=layer), shape)


def expert_names(spec: ModelSpec, dialect: Dialect) -> Iterator[ExpertName]:
    """Every expert tensor of `spec`, bank by bank."""
    for bank, i in enumerate(spec.moe_layers):
        moe = spec.layers[i].ffn
        assert isinstance(moe, MoeSpec)
        record = layout(spec.checkpoint_dtype, spec.hidden, moe.intermediate)
        for row, expert in _expert_rows(dialect.experts, moe.experts):
            shape = _part_shape(record.field(row.field).shape, row.parts)
            shape = shape if expert is not None else (moe.experts, *shape)
            source = row.source.format(i=i, e=expert)
            yield ExpertName(bank, expert, row.field, row.part, row.parts, source, shape)


def _expert_rows(rows: Sequence[ExpertTensor], experts: int) -> Iterator[tuple[ExpertTensor, int | None]]:
    """Each row with each expert, or with None if its tensors hold all of them."""
    single = [row for row in rows if "{e}" in row.source]
    yield from ((row, expert) for expert in range(experts) for row in single)
    yield from ((row, None) for row in rows if row not in single)


def _part_shape(shape: Shape, parts: int) -> Shape:
    """The leading dimension is what is divided."""
    return shape if parts == 1 else (shape[0] // parts, *shape[1:])
