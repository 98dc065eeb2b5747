"""What goes into which shard of a checkpoint whose experts are quantised from another one's. Nothing is read for it."""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from copyengine.checkpoint.header import ITEMSIZE, TensorRef
from copyengine.checkpoint.model import Model
from copyengine.checkpoint.names import Dialect, ExpertName, expert_names, names_linears
from copyengine.checkpoint.schemes import ELEMENT_TYPES, Kind, Scheme
from copyengine.checkpoint.shard_file import Output
from copyengine.families import FAMILIES
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from kernels.formats import ExpertFormat


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


class Linear(Struct, frozen=True):
    """A linear of an expert: `ref` is its weight [N, K], which may be a part of a tensor of the files."""

    ref: TensorRef
    source: str  # the tensor's name
    outputs: tuple[Output, ...]  # one for each tensor of the scheme


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
        return tuple(output for linear in self.linears for output in linear.outputs)


Job = Copied | Quantised


class Shard(Struct, frozen=True):
    """A file to be made."""

    name: str
    jobs: tuple[Job, ...]

    @property
    def outputs(self) -> list[Output]:
        """Its tensors."""
        return [output for job in self.jobs for output in job.outputs]

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for it."""
        return sum(ref.nbytes for job in self.jobs for ref in job.refs)


def plan(model: Model, refs: Mapping[str, TensorRef], scheme: Scheme, shard_nbytes: int) -> list[Shard]:
    """Shards of at most `shard_nbytes` of tensors, or of one job if that is larger, in the order in which
    the files of `model`, whose tensors are all in `refs`, hold what they are made of.

    ConfigError for sizes that the format cannot have, and for a family whose experts' linears have no names.
    """
    experts = {entry.source for entry, _ in model.experts}
    jobs: list[Job] = [*_quantised(model, scheme)]
    jobs += [
        Copied(ref, Output(name, ref.dtype, ref.shape, ref.nbytes)) for name, ref in refs.items() if name not in experts
    ]
    jobs.sort(key=lambda job: (job.refs[0].path, job.refs[0].offset))
    runs = list(_runs(jobs, shard_nbytes))
    return [Shard(f"model-{i:05d}-of-{len(runs):05d}.safetensors", tuple(run)) for i, run in enumerate(runs, 1)]


def _runs(jobs: Sequence[Job], shard_nbytes: int) -> Iterator[list[Job]]:
    run: list[Job] = []
    filled = 0
    for job in jobs:
        nbytes = sum(output.nbytes for output in job.outputs)
        if run and filled + nbytes > shard_nbytes:
            yield run
            run, filled = [], 0
        run.append(job)
        filled += nbytes
    if run:
        yield run


def _quantised(model: Model, scheme: Scheme) -> Iterator[Quantised]:
    spec = msgspec.structs.replace(model.spec, expert_format=ExpertFormat(scheme.format, scheme.block))
    record_layout(spec, "bfloat16")  # refuses sizes that the format cannot have
    sources = {
        (entry.bank, entry.expert, entry.field, entry.part, entry.parts): (entry, ref) for entry, ref in model.experts
    }
    entries = expert_names(spec, _dialect(spec.architecture), scheme)
    fields: dict[tuple[int, int, str], list[Linear]] = {}
    for codes in entries:
        outputs = [_output(codes)] + [_output(next(entries)) for _ in scheme.tensors[1:]]
        assert codes.expert is not None
        linear = Linear(*_weight(codes, sources), tuple(outputs))
        fields.setdefault((codes.bank, codes.expert, codes.field), []).append(linear)
    for (bank, _, _), linears in fields.items():
        yield Quantised(spec.moe_layers[bank], tuple(linears))


def _dialect(architecture: str) -> Dialect:
    for dialect in FAMILIES[architecture].dialects:
        if names_linears(dialect):
            return dialect
    raise ConfigError(f"config.json: the experts of {architecture} cannot be quantised: their linears have no names")


def _output(entry: ExpertName) -> Output:
    shapes: dict[Kind, tuple[int, ...]] = {"global": (), "reciprocal": (1,)}
    shape = shapes.get(entry.kind, entry.shape)
    dtype = ELEMENT_TYPES[entry.kind][0]
    return Output(entry.source, dtype, shape, math.prod(shape) * ITEMSIZE[dtype])


def _weight(
    codes: ExpertName, sources: Mapping[tuple[int, int | None, str, int, int], tuple[ExpertName, TensorRef]]
) -> tuple[TensorRef, str]:
    """Where the weight that becomes `codes` lies in the files, and the name of the tensor that holds it.

    The tensor may be that of all experts, and have gate and up in one.
    """
    rows, columns = codes.shape[0], codes.shape[1] * (2 if codes.kind == "codes" else 1)
    for expert in (codes.expert, None):
        for part, parts in {(codes.part, codes.parts), (0, 1)}:
            found = sources.get((codes.bank, expert, codes.field, part, parts))
            if found is None:
                continue
            entry, ref = found
            nbytes = rows * columns * ITEMSIZE[ref.dtype]
            index = (codes.expert or 0) * (codes.parts // parts) if expert is None else 0
            index += codes.part if parts != codes.parts else 0
            return TensorRef(ref.path, ref.offset + index * nbytes, nbytes, ref.dtype, (rows, columns)), entry.source
    raise AssertionError(f"{codes.source} is made of nothing")
