"""What goes into which shard of a checkpoint whose experts are quantised from another one's. Nothing is read for it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from copyengine.checkpoint.header import ITEMSIZE, TensorRef
from copyengine.checkpoint.model import Model
from copyengine.checkpoint.names import Dialect, ExpertName, expert_names, spells
from copyengine.checkpoint.schemes import ELEMENT_TYPES, Kind, Scheme
from copyengine.checkpoint.shard_file import Output
from copyengine.families import FAMILIES
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError


class Copied(Struct, frozen=True):
    """A tensor that stays as it is."""

    ref: TensorRef
    output: Output

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """What is read for it."""
        return (self.ref,)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What it becomes."""
        return (self.output,)


class Made(Struct, frozen=True):
    """A tensor that a linear becomes, or a part of it if `output` is that of all experts: from byte `start` on."""

    output: Output
    kind: Kind
    start: int = 0


class Linear(Struct, frozen=True):
    """A linear of an expert: `ref` is its weight, which may be a part of a tensor of the files."""

    ref: TensorRef
    source: str  # the tensor's name
    transposed: bool  # the weight is [K, N] there, not [N, K]
    made: tuple[Made, ...]  # one for each tensor of the scheme


class Quantised(Struct, frozen=True):
    """The linears of one expert that share a global: gate and up, or down alone.

    Our records have a global for each of gate and up. Engines that multiply by both at once have one for the two, and
    some take gate's for up's.
    """

    layer: int
    linears: tuple[Linear, ...]

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """What is read for them."""
        return tuple(linear.ref for linear in self.linears)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What they become."""
        return tuple(made.output for linear in self.linears for made in linear.made)


Job = Copied | Quantised


class Shard(Struct, frozen=True):
    """A file to be made."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def outputs(self) -> list[Output]:
        """Its tensors, each once: one of all experts is made by a job for each of them."""
        return list(dict.fromkeys(output for job in self.jobs for output in job.outputs))

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for it."""
        return sum(ref.nbytes for job in self.jobs for ref in job.refs)


def plan(model: Model, refs: Mapping[str, TensorRef], scheme: Scheme, shard_nbytes: int) -> list[Shard]:
    """Shards of at most `shard_nbytes` of tensors, or of one job if that is larger, in the order in which
    the files of `model`, whose tensors are all in `refs`, hold what they are made of.

    A tensor of all experts is not cut. ConfigError for sizes that the format cannot have, and for a family whose files
    cannot spell it.
    """
    quantised = list(_quantised(model, scheme))
    experts = {linear.source for job in quantised for linear in job.linears}
    jobs: list[Job] = [*quantised]
    jobs += [
        Copied(ref, Output(name, ref.dtype, ref.shape, ref.nbytes)) for name, ref in refs.items() if name not in experts
    ]
    jobs.sort(key=lambda job: (job.refs[0].path, job.refs[0].offset))
    runs = list(_runs(jobs, shard_nbytes))
    return [Shard(f"model-{i:05d}-of-{len(runs):05d}.safetensors", tuple(run)) for i, run in enumerate(runs, 1)]


def _runs(jobs: Sequence[Job], shard_nbytes: int) -> Iterator[list[Job]]:
    run: list[Job] = []
    filled, names = 0, set[str]()
    for job in jobs:
        begun = job.outputs[0].name in names
        nbytes = 0 if begun else sum(output.nbytes for output in job.outputs)
        if run and not begun and filled + nbytes > shard_nbytes:
            yield run
            run, filled, names = [], 0, set()
        run.append(job)
        filled += nbytes
        names.update(output.name for output in job.outputs)
    if run:
        yield run


class _Source(NamedTuple):
    """Where the weights lie that fill a field, or a part of it."""

    entry: ExpertName
    ref: TensorRef


_Sources = Mapping[tuple[int, int | None, str, int, int], _Source]
"""By bank, expert (None: all of them), field, part and parts."""


def _quantised(model: Model, scheme: Scheme) -> Iterator[Quantised]:
    """In a table of the scheme's own, biases stand beside the linears: they stay as they are."""
    kind = msgspec.structs.replace(model.spec.expert_format, name=scheme.format, block=scheme.block)
    spec = msgspec.structs.replace(model.spec, expert_format=kind)
    record_layout(spec, "bfloat16")  # refuses sizes that the format cannot have
    sources = {
        (entry.bank, entry.expert, entry.field, entry.part, entry.parts): _Source(entry, ref)
        for entry, ref in model.experts
    }
    dialect = _dialect(spec.architecture, scheme, model.experts[0][0].source)
    entries = (entry for entry in expert_names(spec, dialect, scheme) if entry.kind != "weight")
    fields: dict[tuple[int, int, str], list[Linear]] = {}
    for codes in entries:
        tensors = [codes, *(next(entries) for _ in range(_tensor_count(scheme) - 1))]
        for expert in range(codes.shape[0]) if codes.expert is None else (codes.expert,):
            linear = _linear(tensors, expert, sources)
            fields.setdefault((codes.bank, expert, codes.field), []).append(linear)
    for (bank, _, _), linears in fields.items():
        yield Quantised(spec.moe_layers[bank], tuple(linears))


def _tensor_count(scheme: Scheme) -> int:
    """Of a linear: FUSED_MXFP4's names, codes and powers, are a family's."""
    return len(scheme.tensors) or 2


def _dialect(architecture: str, scheme: Scheme, expert: str) -> Dialect:
    """The names of the quantised experts, under the prefix of `expert`, a tensor of the source's."""
    family = FAMILIES[architecture]
    for dialect in family.spellings:
        if spells(dialect, scheme) and _prefix(dialect.experts[0].source) == _prefix(expert):
            return dialect
    dialects = family.dialects
    own = [dialect.scheme.name for dialect in dialects if dialect.scheme]
    fix = f"use {own[0]}: --format mxfp4 without --dialect" if own else "leave --dialect out"
    raise ConfigError(f"config.json: the experts of {architecture} cannot be written as {scheme.name}; {fix}")


def spelt(architecture: str, scheme: Scheme) -> bool:
    """Whether files of a family can have experts in `scheme`."""
    return any(spells(dialect, scheme) for dialect in FAMILIES[architecture].dialects)


def _linear(tensors: Sequence[ExpertName], expert: int, sources: _Sources) -> Linear:
    """That of `expert`, which becomes `tensors`, the codes first; they may be those of all experts."""
    codes = tensors[0]
    single = codes.expert is not None
    shape = codes.shape if single else (codes.shape[1], math.prod(codes.shape[2:]))
    columns = shape[1] * (2 if codes.kind == "codes" else 1)
    ref, source = _weight(codes, expert, (shape[0], columns), sources)
    made = []
    for entry in tensors:
        output = _output(entry)
        made.append(Made(output, entry.kind, 0 if single else expert * (output.nbytes // entry.shape[0])))
    return Linear(ref, source.source, source.order.transposed, tuple(made))


def _output(entry: ExpertName) -> Output:
    shapes: dict[Kind, tuple[int, ...]] = {"global": (), "reciprocal": (1,)}
    shape = shapes.get(entry.kind, entry.shape)
    dtype = ELEMENT_TYPES[entry.kind][0]
    return Output(entry.source, dtype, shape, math.prod(shape) * ITEMSIZE[dtype])


def _weight(codes: ExpertName, expert: int, shape: tuple[int, int], sources: _Sources) -> tuple[TensorRef, ExpertName]:
    """Where the weight [N, K] = `shape` of `expert` that becomes `codes` lies in the files, and in which tensor.

    The tensor may be that of all experts, and have gate and up in one. Its rows are in the order of those of `codes`.
    """
    for index in (expert, None):
        for part, parts in {(codes.part, codes.parts), (0, 1)}:
            found = sources.get((codes.bank, index, codes.field, part, parts))
            if found is None:
                continue
            entry, ref = found
            assert entry.order.interleaved == codes.order.interleaved
            nbytes = math.prod(shape) * ITEMSIZE[ref.dtype]
            before = expert * (codes.parts // parts) if index is None else 0
            before += codes.part if parts != codes.parts else 0
            stored = shape[::-1] if entry.order.transposed else shape
            return TensorRef(ref.path, ref.offset + before * nbytes, nbytes, ref.dtype, stored), entry
    raise AssertionError(f"{codes.source} is made of nothing")


def _prefix(name: str) -> str:
    """What stands before the layers."""
    return name.partition("layers.")[0]
