"""What --check prints: against the budget it is printed from and figures by hand."""

import re
from pathlib import Path

import msgspec
import pytest

from copyengine.budget import Wanted
from copyengine.link_rate import LinkRate
from copyengine.planning import FreeGpu, Plan
from scheduler.check import Settings, report
from scheduler.collected_stats import Figures, ModeFigures
from tests.copyengine.budget_specs import GB, NVFP4_RECORD, flash_next, spec_of

RATE = LinkRate(55e9, "made up")
SPEC = flash_next()
WANTED = Wanted(max_running=16)
PLAN = Plan(SPEC, "bfloat16", NVFP4_RECORD, 100 * GB, (FreeGpu("cuda:0 X", 16 * GB),))


def text_of(plan: Plan = PLAN, wanted: Wanted = WANTED, stats_file: str = "", rate: LinkRate = RATE) -> str:
    return report(plan, plan.survey(wanted), Settings(wanted, 512, stats_file), rate)


def sizes(text: str, place: str) -> dict[str, int]:
    """MB by name of one memory's table."""
    table = text[text.index(f"{place}\n") :].splitlines()[1:]
    rows = (re.fullmatch(r"  (\S.*?)\s{2,}([\d,]+) MB", line) for line in table)
    found: dict[str, int] = {}
    for row in rows:
        if row is None:
            break
        found[row[1]] = int(row[2].replace(",", ""))
    return found


def test_what_is_needed_adds_up_and_is_compared_with_what_is_there() -> None:
    gpu, host = sizes(text_of(), "memory of cuda:0 X"), sizes(text_of(), "host memory")
    for table, present in ((gpu, 16_000), (host, 100_000)):
        parts = list(table.values())[: list(table).index("needed")]
        assert abs(sum(parts) - table["needed"]) <= len(parts)  # each rounded up
        assert table["present, free"] == present and abs(present - table["needed"] - table["left over"]) <= 1
    assert host["pinned expert banks"] == host["of that pinned"] == 67_955 and "of that pinned" not in gpu
    assert host["to stay free"] == 4_295
    assert {"other weights", "workspace (4096 tokens a step)", "to stay free"} < set(gpu)
    assert any(name.startswith("KV (") for name in gpu) and any(name.startswith("slot pool (") for name in gpu)


def test_that_answers_repeat_is_said() -> None:
    text = report(PLAN, PLAN.survey(WANTED), Settings(WANTED, 512, deterministic=True), RATE)
    assert "answers    repeat bit for bit, whatever else is served (--deterministic)\n" in text
    assert "--deterministic" not in text_of()


def test_every_gpu_and_what_is_missing_is_listed() -> None:
    plan = msgspec.structs.replace(PLAN, gpus=(FreeGpu("cuda:0 X", 80 * GB), FreeGpu("cuda:1 Y", 16 * GB)))
    wanted = msgspec.structs.replace(WANTED, workers=2, slots=6000, kv_placement="host")
    text = text_of(plan, wanted)
    assert "left over" in sizes(text, "memory of cuda:0 X") and sizes(text, "memory of cuda:1 Y")["MISSING"] > 5000
    assert "1.8 ms a decoded token for each 1,000 tokens of context" in text  # 98,304 bytes of each
    assert any(name.startswith("2 x pinned KV (") for name in sizes(text, "host memory"))
    assert "6,000 of 24,576 experts (as asked)" in text and "(auto)" in text
    assert "hit rate" not in text  # of slots that do not fit


def test_hit_rates_and_times_of_flash_next() -> None:
    """By hand, for 2,100 slots: four tokens' 1,864 experts fit, which a token finds 1 - (1 - 10 / 512)^4 of its own in;
    the S likeliest are 2,100 / 24,576; streaming without them takes 22,476 x 2.77 MB at 55 GB/s."""
    plan = msgspec.structs.replace(PLAN, gpus=(FreeGpu("cuda:0 X", 24 * GB),))
    text = text_of(plan, msgspec.structs.replace(WANTED, slots=2100, kv_tokens=8192))
    assert re.search(r"even routing +7\.6 % - 8\.5 %, copying 22\.1 - 22\.3 ms a token\n", text)
    assert re.search(r"each token as the one before +100\.0 %, copying 0\.0 ms a token, since S >= L x K = 480\n", text)
    row = re.search(r"\n +16 +1,130 - 1,236 ms +(\d+) - (\d+) ms +(\d+) - (\d+) ms\n", text)
    assert row
    even, most = 48 * 512 * (1 - (1 - 10 / 512) ** 16) * NVFP4_RECORD / 55e6, int(row[2])
    assert abs(most - even) <= 1 and abs(int(row[1]) - even * (1 - 2100 / 24_576)) <= 1
    assert int(row[3]) < int(row[4]) < most  # a skewed prompt wants fewer
    assert re.search(r"\n +1,024 +1,130 - 1,236 ms +- +-\n", text)  # is not a demand chunk
    assert re.search(r"\n +4,096 +1,130", text)
    chunked = msgspec.structs.replace(WANTED, slots=2100, kv_tokens=8192, max_step_tokens=2048)
    assert re.search(r"\n +4,096 +2,260 - 2,471 ms", text_of(plan, chunked))  # two chunks


def test_a_link_that_was_not_measured_and_a_model_without_experts() -> None:
    assert text_of(rate=LinkRate(0.0, "GPU is full")).endswith("the link was not measured: GPU is full")
    dense = Plan(spec_of(0, 1), "bfloat16", 0, GB)
    text = text_of(dense)
    assert text.endswith("a dense model: there are no experts to copy") and "hit rate" not in text
    assert "slots" not in text


def written(path: Path, layers: int, experts: int, counts: list[list[int]]) -> str:
    none = ModeFigures([], [], [])
    path.write_bytes(msgspec.json.encode(Figures("m", layers, experts, none, none, none, counts)))
    return str(path)


def test_measured_frequencies_are_used_if_they_are_of_this_model(tmp_path: Path) -> None:
    """Where all tokens go to the same ten experts, those are found."""
    spec = flash_next(num_hidden_layers=2)
    plan = msgspec.structs.replace(PLAN, spec=spec)
    counts = [[7] * 10 + [0] * 502] * 2
    text = text_of(plan, stats_file=written(tmp_path / "a.json", 2, 512, counts))
    assert re.search(r"routing as measured +100\.0 % - 100\.0 %", text) and "decode_routing of" in text


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (None, ""),
        (b"{", "not read"),
        (b"{}", "not read"),
        ((8, 64, [[1] * 64] * 8), "of 8 layers of 64 experts: not used"),
        ((48, 512, [[0] * 512] * 48), "nothing was decoded: not used"),
    ],
)
def test_other_files_are_not_and_the_text_says_so(tmp_path: Path, content: object, note: str) -> None:
    path = tmp_path / "stats.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, tuple):
        written(path, *content)
    text = text_of(stats_file=str(path))
    assert "as measured" not in text and note in text and ("note: --collect-stats" in text) == bool(note)
