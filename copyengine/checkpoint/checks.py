"""Finds a model's tensors in the files: each is there, of an element type and a shape that it may have."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from copyengine.checkpoint.header import TensorRef
from copyengine.checkpoint.names import DenseName, ExpertName
from copyengine.checkpoint.schemes import ELEMENT_TYPES, SCHEMES, SIGNS, Kind, Scheme, beside, fits, shape_of
from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import ConfigError

DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""safetensors' spelling -> ours, of the element types a weight may have."""

NEVER_QUANTISED = ("embed", "router", "score_router")
"""Last words of the canonical names of matrices that are no linears, or whose errors would choose other experts."""


CODES = ("U8", "F8_E4M3")
"""Element types of weights that need scales."""


class Linear(Struct, frozen=True):
    """A quantised linear outside the experts, that is dequantised when it is loaded."""

    scheme: Scheme
    refs: tuple[TensorRef, ...]  # as the scheme's tensors
    shape: tuple[int, int]  # [N, K] of the weight
    source: str  # what the weight would be called if it were not quantised


class Checks:
    """Of one checkpoint. ConfigError, naming the tensor, for one that is not there or not as it has to be."""

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        refs: Mapping[str, TensorRef],
        scheme: Scheme | None,
        linear_schemes: Sequence[Scheme],
    ) -> None:
        """`scheme` is that of the experts, `linear_schemes` are those that other linears may have: of them count those
        that say how a linear is spelt, not that of experts alone."""
        self._directory = directory
        self._spec = spec
        self._refs = refs
        self._scheme = scheme
        self._linear_schemes = [scheme for scheme in linear_schemes if scheme.tensors]

    def dense(self, entry: DenseName) -> TensorRef | Linear:
        """A tensor that is none of an expert's."""
        ref = self._refs.get(entry.source)
        sign = self._sign(entry.source)
        if sign:
            return self._linear(entry, sign)
        if ref is not None and ref.dtype in CODES and self._linear_schemes and len(entry.shape) == 2:
            return self._linear(entry, entry.source)
        if ref is None:
            is_head = entry.name == "head"
            hint = "; a checkpoint without it needs tie_word_embeddings: true" if is_head else ""
            raise self._missing(entry.source, hint)
        return _floating(ref, entry.source, entry.shape)

    def expert(self, entry: ExpertName) -> TensorRef:
        """A tensor of one expert, or of all experts of a layer."""
        sign = self._sign(entry.source) if self._scheme is None else ""
        if sign:
            raise self._quantised(entry.source, sign, "config.json has no quantization_config that says so")
        ref = self._refs.get(entry.source)
        if ref is None:
            raise self._missing(entry.source, self._expert_hint(entry))
        if self._scheme is None or entry.kind == "weight":
            return _floating(ref, entry.source, entry.shape)
        return _of_kind(ref, entry.source, self._scheme, entry.kind, entry.shape)

    def _linear(self, entry: DenseName, sign: str) -> Linear:
        """Written in the scheme that most of its tensors are of."""
        if len(entry.shape) != 2 or entry.name.endswith(NEVER_QUANTISED):
            raise self._quantised(entry.source, sign, "only linears may be: take a checkpoint where it is not")
        if not self._linear_schemes:
            raise self._quantised(entry.source, sign, "config.json has no quantization_config that says so")
        rows, columns = entry.shape
        shapes = {scheme: _shapes(scheme, rows, columns) for scheme in self._linear_schemes}
        possible = [scheme for scheme in self._linear_schemes if None not in shapes[scheme]]
        if not possible:
            names = ", ".join(scheme.name for scheme in self._linear_schemes)
            raise self._quantised(entry.source, sign, f"{names} cannot be of {rows} x {columns}")
        scheme = max(possible, key=lambda scheme: self._tensors_of(scheme, entry.source, rows, columns))
        refs = []
        for tensor in scheme.tensors:
            name, shape = beside(entry.source, tensor.suffix), shape_of(scheme, tensor.kind, rows, columns)
            ref = self._refs.get(name)
            if ref is None:
                raise self._missing(name, f": {sign} is there, and config.json says {scheme.name}")
            assert shape is not None
            refs.append(_of_kind(ref, name, scheme, tensor.kind, shape))
        return Linear(scheme, tuple(refs), (rows, columns), entry.source)

    def _tensors_of(self, scheme: Scheme, source: str, rows: int, columns: int) -> int:
        """How many of the linear's tensors are there as `scheme` has them, a right name counting for half."""
        count = 0
        for tensor in scheme.tensors:
            ref, shape = self._refs.get(beside(source, tensor.suffix)), shape_of(scheme, tensor.kind, rows, columns)
            if ref is not None and shape is not None:
                count += 1 + fits(tensor.kind, ref.dtype, ref.shape, shape)
        return count

    def _sign(self, source: str) -> str:
        """The name of a tensor beside `source` that only quantised linears have, and that is not empty; "" if none."""
        names = (beside(source, suffix) for suffix in SIGNS)
        return next((name for name in names if name in self._refs and self._refs[name].nbytes), "")

    def _quantised(self, source: str, sign: str, why: str) -> ConfigError:
        return ConfigError(f"{self._refs[sign].path}: {source} is quantised ({sign} is there), but {why}")

    def _missing(self, source: str, hint: str) -> ConfigError:
        return ConfigError(
            f"{self._directory}: tensor {source} is missing, which {self._spec.architecture} with "
            f"{len(self._spec.layers)} layers needs{hint}"
        )

    def _expert_hint(self, entry: ExpertName) -> str:
        """Whose tensor it is, and whether the files are of another scheme than config.json says."""
        codes = f"{entry.source}_blocks"
        if self._scheme is None and codes in self._refs:
            return f"; {codes} is there, but config.json has no quantization_config with quant_method mxfp4"
        if self._scheme is None or entry.expert is None:
            return ""
        whose = f" for expert {entry.expert} of layer {self._spec.moe_layers[entry.bank]}"
        stem, _, suffix = entry.source.rpartition(".")
        if suffix == self._scheme.input_scale:
            return f"{whose}, whose activations are to be rounded; use --expert-activations plain"
        for other in SCHEMES:
            for tensor in other.tensors:
                name = f"{stem}.{tensor.suffix}"
                if name in self._refs and tensor not in self._scheme.tensors:
                    found = f"{name} ({self._refs[name].dtype})"
                    return f"{whose}; {found} is there, but config.json says {self._scheme.name}"
        return whose


def _shapes(scheme: Scheme, rows: int, columns: int) -> list[tuple[int, ...] | None]:
    return [shape_of(scheme, tensor.kind, rows, columns) for tensor in scheme.tensors]


def _floating(ref: TensorRef, source: str, shape: tuple[int, ...]) -> TensorRef:
    """`ref`, which is `shape` and not quantised."""
    if ref.dtype not in DTYPES:
        raise ConfigError(f"{ref.path}: tensor {source} has element type {ref.dtype}; supported: {', '.join(DTYPES)}")
    return _shaped(ref, source, shape)


def _of_kind(ref: TensorRef, source: str, scheme: Scheme, kind: Kind, shape: tuple[int, ...]) -> TensorRef:
    """`ref`, which is a tensor of that kind of a quantised linear."""
    wanted = ELEMENT_TYPES[kind]
    if ref.dtype not in wanted:
        raise ConfigError(
            f"{ref.path}: tensor {source} has element type {ref.dtype}, but config.json's quantization_config says "
            f"{scheme.name}, where it is {' or '.join(wanted)}"
        )
    return ref if fits(kind, ref.dtype, ref.shape, shape) else _shaped(ref, source, shape)


def _shaped(ref: TensorRef, source: str, shape: tuple[int, ...]) -> TensorRef:
    if ref.shape != shape:
        raise ConfigError(f"{ref.path}: tensor {source} has shape {list(ref.shape)}, config.json wants {list(shape)}")
    return ref
