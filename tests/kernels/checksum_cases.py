"""The checksum kernels against plain torch, on any device."""

import torch

from kernels.checksum import RecordChecks, check_records, new_record_checks, ref, slot_sums

BLOCK = 32
LAYERS, EXPERTS, SLOTS = 2, 7, 12
ABSENT = -1


def made_up(words: int, device: str) -> tuple[RecordChecks, torch.Tensor, torch.Tensor]:
    """Checks of layers whose experts are in the slots of a table [L, E], the pool, and the table."""
    generator = torch.Generator().manual_seed(words)
    pool = torch.randint(0, 256, (SLOTS, 4 * words), dtype=torch.uint8, generator=generator)
    table = torch.full((LAYERS, EXPERTS), ABSENT, dtype=torch.int32)
    places = torch.randperm(SLOTS, generator=generator)[: SLOTS - 2].int()
    table.view(-1)[torch.randperm(LAYERS * EXPERTS, generator=generator)[: SLOTS - 2]] = places
    within, blocks = (
        torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator) | 1 for n in (BLOCK, -(-words // BLOCK))
    )
    expected = torch.stack([ref.slot_sums(pool, row, within, blocks) for row in table])
    return new_record_checks(expected, within, blocks, torch.device(device)), pool.to(device), table.to(device)


def noted(checks: RecordChecks, layer: int, pool: torch.Tensor, slot_of: torch.Tensor, begin: int, end: int) -> None:
    """One look at a layer, with every second expert routed to, against plain torch; nothing is found twice."""
    span = torch.tensor([begin, end], dtype=torch.int32)
    offsets = torch.tensor([(e + 1) // 2 for e in range(EXPERTS + 1)], dtype=torch.int32)
    host = ref.slot_sums(pool.cpu(), slot_of.cpu(), checks.within.cpu(), checks.blocks.cpu())
    wrong = ref.damaged(checks.expected[layer].cpu(), host, slot_of.cpu(), span, offsets).nonzero().flatten().tolist()
    before: list[int] = checks.damage.tolist()
    device = pool.device
    check_records(checks, layer, pool, slot_of, span.to(device), offsets.to(device), end - begin)
    first = before[1] if before[0] or not wrong else layer * EXPERTS + wrong[0]
    assert checks.damage.tolist() == [before[0] + len(wrong), first]


def check_all(device: str) -> None:
    """Records of less than a block, of a block and a few words more or less, of more blocks than programs; sound, with
    single bits turned, with words changed places; slots that are empty, beside the span or not routed to."""
    for words in (4, BLOCK - 4, BLOCK, BLOCK + 4, 40 * BLOCK - 8):
        checks, pool, table = made_up(words, device)
        everywhere = torch.arange(-1, SLOTS, dtype=torch.int32)
        host = ref.slot_sums(pool.cpu(), everywhere, checks.within.cpu(), checks.blocks.cpu())
        assert torch.equal(slot_sums(checks, pool, everywhere.to(device)).cpu(), host)
        for layer in range(LAYERS):
            noted(checks, layer, pool, table[layer], 0, EXPERTS)
        assert checks.damage.tolist() == [0, 0]
        for slot, byte, bit in ((0, 0, 0), (3, 4 * words - 1, 7), (7, 2 * words, 3)):
            pool[slot, byte] ^= 1 << bit
        pool[5].view(torch.int32)[[0, words - 1]] = pool[5].view(torch.int32)[[words - 1, 0]]
        for layer in range(LAYERS):
            for begin, end in ((0, EXPERTS), (2, 5), (4, 4)):
                noted(checks, layer, pool, table[layer], begin, end)
        assert checks.damage[0] > 0
