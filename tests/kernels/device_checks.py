"""The Triton kernels on a CUDA device against the CPU, float64 and themselves: for the gpu tests and the benchmark."""

import math

import torch

from kernels.formats import ExpertFormat, RecordLayout, layout
from kernels.grouped_gemm import InputScales, arrange, block_rows, combine, grouped_gemm_slots, ref
from kernels.moe_align import Blocks, align_in_blocks, blocks, moe_align
from tests.kernels.expert_records import KINDS, Experts
from worker.layer_rows import LayerRows

EXPERT_COUNTS = (1, 8, 512, 1023, 1024, 2100)
TOLERANCE = {"float32": 1e-5, "w4a4": 5e-2}
"""Of ||out - expected|| / ||expected||, of other kinds 1e-2. With w4a4 rounding moves some of down's inputs to another
code."""


def alignment(num_experts: int, tokens: int, k: int) -> None:
    """Routes, offsets and blocks equal the reference's on the CPU."""
    generator = torch.Generator().manual_seed(num_experts + tokens)
    experts = torch.randint(0, num_experts, (tokens, k), dtype=torch.int32, generator=generator)
    on_host, on_device = moe_align(experts, num_experts), moe_align(experts.cuda(), num_experts)
    assert torch.equal(on_device.routes.cpu(), on_host.routes)
    assert torch.equal(on_device.offsets.cpu(), on_host.offsets)
    for rows in (1, 16, 128):
        expected, in_two = blocks(on_host, rows), blocks(on_device, rows)
        alignment_in_one, in_one = align_in_blocks(experts.cuda(), num_experts, rows)
        assert all(torch.equal(*pair) for pair in zip(alignment_in_one, on_device, strict=True))
        used = int(expected.starts[-1])
        for actual in (in_two, in_one):
            assert torch.equal(actual.starts.cpu(), expected.starts)
            for name in ("expert", "first", "rows"):
                assert torch.equal(getattr(actual, name)[:used].cpu(), getattr(expected, name)[:used])


def sums(tokens: int, k: int, hidden: int) -> None:
    """combine equals the reference on the CPU."""
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.randn(tokens * k, hidden, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        assert torch.equal(combine(rows.cuda(), tokens).cpu(), ref.combine(rows, tokens))


def values(kind: ExpertFormat | str, tokens: int, hidden: int, intermediate: int, num_experts: int, k: int) -> float:
    """The relative error against float64, which is within TOLERANCE; `kind` as for expert_records.Experts."""
    generator = torch.Generator().manual_seed(tokens + hidden)
    experts = Experts(kind, hidden, intermediate, num_experts, generator)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).cuda()
    weights, chosen = routing(tokens, num_experts, k, generator)
    slot_of = torch.randperm(num_experts, generator=generator).to(torch.int32)
    pool = experts.pool(num_experts, dict(enumerate(slot_of.tolist())), "cuda")
    table, scales = table_of(chosen, num_experts, experts.layout), experts.input_scales(x)
    rows = run(x, weights, table, pool, experts.layout, slot_of.cuda(), input_scales=scales)
    expected = experts.float64(x, weights, chosen)
    error = float((rows.double().cpu() - expected).norm() / expected.norm())
    assert error <= TOLERANCE.get(kind if isinstance(kind, str) else kind.name, 1e-2), (kind, tokens, error)
    return error


def bits(kind: str, tokens: int, num_experts: int, k: int, hidden: int, intermediate: int) -> None:
    """Rows are equal in one launch and in queries, in slots of their numbers and in others of a poisoned pool."""
    generator = torch.Generator().manual_seed(tokens)
    record = layout(KINDS.get(kind, kind), hidden, intermediate)
    pool = random_records(record, num_experts, tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16).cuda()
    weights, chosen = routing(tokens, num_experts, k, generator)
    table = table_of(chosen, num_experts, record)
    scales = InputScales(0.01, 0.001) if record.kind.quantised_inputs else None
    in_order = torch.arange(num_experts, dtype=torch.int32, device="cuda")
    plain = run(x, weights, table, pool, record, in_order, input_scales=scales)
    assert torch.isfinite(plain).all() and plain.any(dim=1).all()

    slots = num_experts + num_experts // 3 + 5
    slot_of = torch.randperm(slots, generator=generator)[:num_experts].cuda()
    poisoned = torch.full((slots, record.record_nbytes), 0xFF, dtype=torch.uint8, device="cuda")
    poisoned[slot_of] = pool
    for query in (num_experts, 128, 3):
        rows = run(x, weights, table, poisoned, record, slot_of.to(torch.int32), query, scales)
        assert torch.equal(rows, plain), (kind, tokens, query)
    assert torch.equal(one_query_in_slots(x, weights, table, pool, record, 3, scales), plain), (kind, tokens)
    without(x, weights, chosen, poisoned, record, slot_of.to(torch.int32), plain, scales)


def fixed_rows_alike(kind: str, tokens: int, num_experts: int, k: int, hidden: int, intermediate: int) -> None:
    """Rows of tiles with a fixed order of sums are near those of the other tiles, and those of each token alone."""
    generator = torch.Generator().manual_seed(tokens)
    record = layout(KINDS.get(kind, kind), hidden, intermediate)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    pool = random_records(record, num_experts, tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).cuda()
    weights, chosen = routing(tokens, num_experts, k, generator)
    scales = InputScales(0.01, 0.001) if record.kind.quantised_inputs else None
    slot_of = torch.arange(num_experts, dtype=torch.int32, device="cuda")

    def rows(part: slice) -> torch.Tensor:
        here = LayerRows(record, num_experts, x[part], weights[part], chosen[part], scales, fixed=True)
        span = torch.tensor([0, num_experts], dtype=torch.int32, device="cuda")
        here.compute(pool, slot_of, span, num_experts)
        return here.combined()

    whole = rows(slice(0, tokens))
    plain = combine(run(x, weights, table_of(chosen, num_experts, record), pool, record, slot_of, None, scales), tokens)
    assert float((whole.double() - plain.double()).norm() / plain.double().norm()) <= 1e-2
    for first, count in [(t, 1) for t in range(0, tokens, 37)] + [(0, 2), (5, 16), (9, 33), (100, 129)]:
        assert torch.equal(rows(slice(first, first + count)), whole[first : first + count]), (kind, first, count)


def without(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    pool: torch.Tensor,
    record: RecordLayout,
    slot_of: torch.Tensor,
    plain: torch.Tensor,
    scales: InputScales | None,
) -> None:
    """Experts without a slot are left out, the other rows are `plain`'s; x arranged before, and space given."""
    table = table_of(chosen, slot_of.shape[0], record)
    some = torch.where(torch.arange(slot_of.shape[0], device="cuda") % 3 == 1, -1, slot_of).to(torch.int32)
    absent = some[chosen.flatten().long()] < 0
    span = torch.tensor([0, slot_of.shape[0]], dtype=torch.int32, device="cuda")
    rows = torch.full_like(plain, float("nan"))
    mid = torch.full((plain.shape[0], record.intermediate), float("nan"), dtype=x.dtype, device="cuda")
    left = arrange(x, record, scales)
    how = {"arranged": True, "mid": mid, "input_scales": scales}
    grouped_gemm_slots(left, weights, table, pool, record, some, span, slot_of.shape[0], rows, **how)  # type: ignore[arg-type]
    assert rows[absent].isnan().all() and torch.equal(rows[~absent], plain[~absent])


def one_query_in_slots(
    x: torch.Tensor,
    weights: torch.Tensor,
    table: Blocks,
    bank: torch.Tensor,
    record: RecordLayout,
    query: int,
    scales: InputScales | None = None,
) -> torch.Tensor:
    """[T * K, H] by way of a pool that holds a query's experts during its launch; the others' slot is not a number."""
    rows = torch.full((weights.numel(), x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    pool = torch.full((query + 1, record.record_nbytes), 0xFF, dtype=torch.uint8, device=x.device)
    for begin in range(0, bank.shape[0], query):
        end = min(begin + query, bank.shape[0])
        slot_of = torch.full((bank.shape[0],), query, dtype=torch.int32, device=x.device)
        slot_of[begin:end] = torch.arange(end - begin - 1, -1, -1, dtype=torch.int32, device=x.device)
        pool[: end - begin] = bank[begin:end].flip(0)
        span = torch.tensor([begin, end], dtype=torch.int32, device=x.device)
        grouped_gemm_slots(x, weights, table, pool, record, slot_of, span, end - begin, rows, input_scales=scales)
    return rows


def routing(tokens: int, num_experts: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniform: weights [T, K] float32 and K different experts a token, [T, K] int32, on the device."""
    chosen = torch.rand(tokens, num_experts, generator=generator).topk(k, dim=1).indices.to(torch.int32)
    weights = torch.rand(tokens, k, generator=generator) + 0.1
    return (weights / weights.sum(1, keepdim=True)).cuda(), chosen.cuda()


def table_of(chosen: torch.Tensor, num_experts: int, record: RecordLayout) -> Blocks:
    rows = block_rows(chosen.shape[0], chosen.shape[1], num_experts, record, chosen.device)
    return blocks(moe_align(chosen, num_experts), rows)


def run(
    x: torch.Tensor,
    weights: torch.Tensor,
    table: Blocks,
    pool: torch.Tensor,
    record: RecordLayout,
    slot_of: torch.Tensor,
    query: int | None = None,
    input_scales: InputScales | None = None,
) -> torch.Tensor:
    """[T * K, H], not-a-number where nothing was written; a launch for every `query` neighbouring experts."""
    rows = torch.full((weights.numel(), x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    num_experts = slot_of.shape[0]
    for begin in range(0, num_experts, query or num_experts):
        end = min(begin + (query or num_experts), num_experts)
        span = torch.tensor([begin, end], dtype=torch.int32, device=x.device)
        grouped_gemm_slots(x, weights, table, pool, record, slot_of, span, end - begin, rows, input_scales=input_scales)
    return rows


def random_records(record: RecordLayout, count: int, seed: int) -> torch.Tensor:
    """[count, record_nbytes] uint8 on the device: weights of about unit gain, made there, without a quantiser."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pool = torch.full((count, record.record_nbytes), 0xFF, dtype=torch.uint8, device="cuda")
    for field in record.fields:
        shape = (count, *field.shape)
        gain = (record.intermediate if field.name.startswith("down") else record.hidden) ** -0.5
        match field.dtype:
            case "uint8" if field.name.endswith("_scale"):  # powers of two about the gain over the codes' 2.93
                middle = 127 + round(math.log2(gain / 3))
                tensor = torch.randint(middle - 1, middle + 2, shape, device="cuda", generator=generator)
                tensor = tensor.to(torch.uint8)
            case "uint8":
                tensor = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
            case "float8_e4m3" if record.format == "nvfp4":  # 0.5 .. 2
                tensor = torch.randint(0x30, 0x41, shape, dtype=torch.uint8, device="cuda", generator=generator)
            case "float8_e4m3":
                tensor = torch.empty(shape, device="cuda").normal_(0, 3, generator=generator).to(torch.float8_e4m3fn)
            case "float32" if field.name.endswith("_bias"):
                tensor = torch.empty(shape, device="cuda").normal_(0, 0.3, generator=generator)
            case "float32" if record.format != "float32":  # the root mean square of the codes is about 3
                tensor = gain / 3 * (1 + torch.rand(shape, device="cuda", generator=generator))
            case _:
                kind = torch.float32 if record.format == "float32" else torch.bfloat16
                tensor = torch.empty(shape, dtype=kind, device="cuda").normal_(0, gain, generator=generator)
        pool[:, field.offset : field.offset + field.nbytes] = tensor.contiguous().flatten(1).view(torch.uint8)
    return pool
