"""Plain torch."""

import itertools

import torch


def moe_align(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat = experts.reshape(-1)
    routes = torch.sort(flat, stable=True).indices.to(torch.int32)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    offsets[1:] = torch.bincount(flat, minlength=num_experts).cumsum(0)
    return routes, offsets


def blocks(
    offsets: torch.Tensor, block_rows: int, bound: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    bounds = offsets.tolist()
    starts = [0]
    table: list[tuple[int, int, int]] = []
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
        table += [(expert, row, min(block_rows, end - row)) for row in range(begin, end, block_rows)]
        starts.append(len(table))
    padded = torch.tensor(table + [(0, 0, 0)] * (bound - len(table)), dtype=torch.int32).reshape(bound, 3)
    columns = padded.to(offsets.device).T.contiguous()
    return torch.tensor(starts, dtype=torch.int32, device=offsets.device), columns[0], columns[1], columns[2]
