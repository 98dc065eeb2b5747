"""Random experts of any format, as records in the slots of a pool, and what they compute in float64."""

import torch

from kernels.formats import RecordLayout, layout
from kernels.grouped_gemm import ref
from kernels.quant import quant

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Experts:
    """`records` [count, record_nbytes] uint8 of random weights; 0xFF (not a number) between the fields."""

    def __init__(
        self, format_name: str, hidden: int, intermediate: int, count: int, generator: torch.Generator
    ) -> None:
        self.layout: RecordLayout = layout(format_name, hidden, intermediate)
        self.count = count
        self.records = torch.full((count, self.layout.record_nbytes), 0xFF, dtype=torch.uint8)
        for record in self.records:
            gate_up = torch.randn(2 * intermediate, hidden, generator=generator) * hidden**-0.5
            down = torch.randn(hidden, intermediate, generator=generator) * intermediate**-0.5
            gate_up[:intermediate] *= 2  # so that gate and up have different globals
            for name, tensor in fields(format_name, gate_up, down).items():
                field = self.layout.field(name)
                record[field.offset : field.offset + field.nbytes] = tensor.contiguous().view(torch.uint8).flatten()

    def pool(self, slots: int, slot_of: dict[int, int], device: str = "cpu") -> torch.Tensor:
        """[slots, record_nbytes] uint8 with expert e in slot `slot_of[e]`, 0xFF in the others."""
        pool = torch.full((slots, self.layout.record_nbytes), 0xFF, dtype=torch.uint8, device=device)
        for expert, slot in slot_of.items():
            pool[slot] = self.records[expert].to(device)
        return pool

    def float64(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[T * K, H] float64 on the CPU, row by row, from the records' exact values."""
        dtype = _DTYPES.get(self.layout.format, torch.float64)
        matrices = [[m.double() for m in ref.matrices(record, self.layout, dtype)] for record in self.records]
        out = torch.zeros(*chosen.shape, self.layout.hidden, dtype=torch.float64)
        for t, experts in enumerate(chosen.tolist()):
            for k, expert in enumerate(experts):
                gate_up, down = matrices[expert]
                gate, up = (gate_up @ x[t].double().cpu()).chunk(2)
                out[t, k] = weights[t, k].double().cpu() * (down @ (gate / (1 + torch.exp(-gate)) * up))
        return out.flatten(0, 1)


def fields(format_name: str, gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of one expert's record: `gate_up` [2I, H] and `down` [H, I] float32, brought to the format."""
    if format_name != "nvfp4":
        dtype = _DTYPES[format_name]
        return {"gate_up": gate_up.to(dtype), "down": down.to(dtype)}
    gate, up, below = (quant(part) for part in (*gate_up.chunk(2), down))
    return {
        "gate_up": torch.cat([gate.codes, up.codes]),
        "gate_up_scale": torch.cat([gate.scales.view(torch.uint8), up.scales.view(torch.uint8)]),
        "gate_up_global": torch.stack([gate.scale, up.scale]),
        "down": below.codes,
        "down_scale": below.scales,
        "down_global": below.scale.reshape(1),
    }
