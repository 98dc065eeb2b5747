"""Streaming order: by hand, and as properties of any sequence of requests and finishes."""

from hypothesis import given
from hypothesis import strategies as st

from worker.stream_cursor import StreamCursor

absent_experts = st.lists(st.lists(st.integers(0, 20), unique=True, max_size=12).map(sorted), max_size=5)


def test_two_groups_of_two_by_hand() -> None:
    cursor = StreamCursor([[1, 2, 5], [], [0]], groups=2, group_slots=2, first_slot=10, first_flag=7)
    first, second = cursor.next_request(), cursor.next_request()
    assert first is not None and (first.layer, first.experts, first.slots, first.flag) == (0, (1, 2), (10, 11), 7)
    assert second is not None and (second.layer, second.experts, second.slots, second.flag) == (0, (5,), (12,), 8)
    assert cursor.next_request() is None
    assert cursor.due(0) is first
    cursor.finish()
    third = cursor.next_request()
    assert third is not None and (third.layer, third.experts, third.slots, third.flag) == (2, (0,), (10,), 7)
    assert cursor.due(0) is second
    cursor.finish()
    assert cursor.due(1) is None and cursor.due(2) is third
    cursor.finish()
    assert cursor.due(2) is None and cursor.next_request() is None


@given(absent_experts, st.integers(1, 4), st.integers(1, 5))
def test_every_absent_expert_once_and_no_slot_twice_at_a_time(
    absent: list[list[int]], groups: int, group_slots: int
) -> None:
    cursor = StreamCursor(absent, groups, group_slots, first_slot=3, first_flag=0)
    under_way: dict[int, tuple[int, ...]] = {}
    seen: list[tuple[int, int]] = []

    def request() -> None:
        while (query := cursor.next_request()) is not None:
            assert query.flag not in under_way
            assert not set(query.slots) & {slot for slots in under_way.values() for slot in slots}
            assert min(query.slots) >= 3 and max(query.slots) < 3 + groups * group_slots
            under_way[query.flag] = query.slots

    request()
    for layer in range(len(absent)):
        while (query := cursor.due(layer)) is not None:
            seen += [(query.layer, expert) for expert in query.experts]
            assert query.layer == layer
            del under_way[query.flag]
            cursor.finish()
            request()
    assert seen == [(layer, expert) for layer, experts in enumerate(absent) for expert in experts]
    assert not under_way
