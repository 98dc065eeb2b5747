"""Random experts of any format, as records in the slots of a pool, and what they compute in float64."""

import torch

from kernels.formats import QUANTISED, ExpertFormat, RecordLayout, layout
from kernels.grouped_gemm import InputScales, ref
from kernels.quant import quant, quant_fp8_block, quant_fp8_tensor, quant_mxfp4, quantised_inputs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

KINDS = {
    "nvfp4": ExpertFormat("nvfp4"),
    "mxfp4": ExpertFormat("mxfp4"),
    "fp8_tensor": ExpertFormat("fp8_tensor"),
    "fp8_block": ExpertFormat("fp8_block", block=(24, 40)),
    "gpt-oss": ExpertFormat("mxfp4", bias=True, swiglu_limit=0.9),
    "w4a4": ExpertFormat("nvfp4", quantised_inputs=True),
}
"""One of each quantised format and what else experts may have; blocks whose sizes are no powers of two."""


class Experts:
    """`records` [count, record_nbytes] uint8 of random weights; 0xFF (not a number) between the fields."""

    def __init__(
        self, kind: ExpertFormat | str, hidden: int, intermediate: int, count: int, generator: torch.Generator
    ) -> None:
        """`kind` may be a name of KINDS or of a format."""
        kind = KINDS.get(kind, kind) if isinstance(kind, str) else kind
        self.layout: RecordLayout = layout(kind, hidden, intermediate)
        self.count = count
        self.records = torch.full((count, self.layout.record_nbytes), 0xFF, dtype=torch.uint8)
        for record in self.records:
            gate_up = torch.randn(2 * intermediate, hidden, generator=generator) * hidden**-0.5
            down = torch.randn(hidden, intermediate, generator=generator) * intermediate**-0.5
            gate_up[:intermediate] *= 2  # so that gate and up have different globals
            biases = {}
            if self.layout.kind.bias:
                biases["gate_up_bias"] = torch.randn(2 * intermediate, generator=generator) / 3
                biases["down_bias"] = torch.randn(hidden, generator=generator) / 3
            for name, tensor in (fields(self.layout.kind, gate_up, down) | biases).items():
                field = self.layout.field(name)
                record[field.offset : field.offset + field.nbytes] = tensor.contiguous().view(torch.uint8).flatten()

    def pool(self, slots: int, slot_of: dict[int, int], device: str = "cpu") -> torch.Tensor:
        """[slots, record_nbytes] uint8 with expert e in slot `slot_of[e]`, 0xFF in the others."""
        pool = torch.full((slots, self.layout.record_nbytes), 0xFF, dtype=torch.uint8, device=device)
        for expert, slot in slot_of.items():
            pool[slot] = self.records[expert].to(device)
        return pool

    def input_scales(self, x: torch.Tensor) -> InputScales | None:
        """Such that blocks of inputs get scales all over E4M3's range; float32 numbers."""
        if not self.layout.kind.quantised_inputs:
            return None
        largest = float(x.abs().max()) if x.numel() else 1.0
        return InputScales(*torch.tensor([largest / (6 * 448), 2 / (6 * 448)]).tolist())

    def float64(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[T * K, H] float64 on the CPU, row by row, from the records' exact values.

        Inputs that are quantised are so under `input_scales(x)`; that of down is rounded to the type of x before.
        """
        scales = self.input_scales(x)
        x, weights = x.cpu(), weights.cpu()
        inputs = x.double() if scales is None else quantised_inputs(x, scales.gate_up).double() * scales.gate_up
        experts = [self._exact(record) for record in self.records]
        out = torch.zeros(*chosen.shape, self.layout.hidden, dtype=torch.float64)
        for t, row in enumerate(chosen.tolist()):
            for k, expert in enumerate(row):
                gate_up, down, gate_up_bias, down_bias = experts[expert]
                gate, up = (gate_up @ inputs[t] + gate_up_bias).chunk(2)
                hidden = activation(gate, up, self.layout.kind.swiglu_limit)
                if scales is not None:
                    rounded = hidden.to(x.dtype).unsqueeze(0)
                    hidden = quantised_inputs(rounded, scales.down)[0].double() * scales.down
                out[t, k] = weights[t, k].double() * (down @ hidden + down_bias)
        return out.flatten(0, 1)

    def _exact(self, record: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """gate_up, down and their biases in float64."""
        dtype = torch.float64 if self.layout.format in QUANTISED else _DTYPES[self.layout.format]
        gate_up, down = (matrix.double() for matrix in ref.matrices(record, self.layout, dtype))
        biases = [torch.zeros(gate_up.shape[0]), torch.zeros(down.shape[0])]
        if self.layout.kind.bias:
            places = [self.layout.field(f"{name}_bias") for name in ("gate_up", "down")]
            biases = [record[place.offset : place.offset + place.nbytes].view(torch.float32) for place in places]
        return gate_up, down, biases[0].double(), biases[1].double()


def activation(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(gate) * up, or gpt-oss' clamped SwiGLU, written out."""
    if limit is None:
        return gate / (1 + torch.exp(-gate)) * up
    gate = torch.minimum(gate, torch.tensor(limit))
    up = torch.maximum(torch.minimum(up, torch.tensor(limit)), torch.tensor(-limit))
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


def fields(kind: ExpertFormat, gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of one expert's record: `gate_up` [2I, H] and `down` [H, I] float32, brought to the format."""
    parts = (*gate_up.chunk(2), down)
    match kind.name:
        case "nvfp4":
            gate, up, below = (quant(part) for part in parts)
            scales = [matrix.scales.view(torch.uint8) for matrix in (gate, up, below)]
            globals_ = {"gate_up_global": torch.stack([gate.scale, up.scale]), "down_global": below.scale.reshape(1)}
            return _stacked([gate.codes, up.codes, below.codes], scales) | globals_
        case "mxfp4":
            powers = [quant_mxfp4(part) for part in parts]
            return _stacked([matrix.codes for matrix in powers], [matrix.scales for matrix in powers])
        case "fp8_block":
            blocks = [quant_fp8_block(part, kind.block) for part in parts]
            codes = [matrix.codes.view(torch.uint8) for matrix in blocks]
            return _stacked(codes, [matrix.scales for matrix in blocks])
        case "fp8_tensor":
            whole = [quant_fp8_tensor(part) for part in parts]
            codes = [matrix.codes.view(torch.uint8) for matrix in whole]
            return _stacked(codes, [matrix.scale.reshape(1) for matrix in whole])
    return {"gate_up": gate_up.to(_DTYPES[kind.name]), "down": down.to(_DTYPES[kind.name])}


def _stacked(codes: list[torch.Tensor], scales: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate's and up's one below the other."""
    return {
        "gate_up": torch.cat(codes[:2]),
        "gate_up_scale": torch.cat(scales[:2]),
        "down": codes[2],
        "down_scale": scales[2],
    }
