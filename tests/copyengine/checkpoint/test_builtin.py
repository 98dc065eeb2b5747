"""ensure_builtin: against its manifest, and against real processes that race for the same directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from copyengine.checkpoint import builtin
from copyengine.checkpoint.builtin import NAME, ensure_builtin, is_intact
from copyengine.checkpoint.model import expert_file_nbytes, open_model
from copyengine.wire.errors import ConfigError

ENSURE = "import sys; from pathlib import Path; from copyengine.checkpoint.builtin import ensure_builtin as e"
ENSURE += "; print(e(Path(sys.argv[1])))"


def start(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", ENSURE, str(cache)], stdout=subprocess.PIPE, text=True)


def models(cache: Path) -> list[str]:
    """What is in the cache, but for the lock."""
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    results = []
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        results.append(out.strip())
    return results


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that two processes filled at the same time."""
    cache = tmp_path_factory.mktemp("cache") / "not" / "there" / "yet"
    assert outputs([start(cache), start(cache)]) == [str(cache / NAME)] * 2
    return cache


def test_two_starts_at_once_leave_one_whole_model(cache: Path) -> None:
    assert models(cache) == [NAME]
    assert is_intact(cache / NAME)


def test_it_is_the_model_that_was_promised(cache: Path) -> None:
    model = open_model(cache / NAME)
    moe = model.spec.moe
    assert moe is not None and (len(model.spec.moe_layers), moe.experts, moe.experts_per_token) == (8, 64, 8)
    assert model.spec.max_position == 8192 and model.random_weights and moe.norm_topk_prob
    assert expert_file_nbytes(model) == 100_663_296


def test_it_is_reused(cache: Path) -> None:
    before = (cache / NAME).stat().st_ino
    assert ensure_builtin(cache, on_progress=lambda _: pytest.fail("built again")) == cache / NAME
    assert (cache / NAME).stat().st_ino == before


def test_two_repairs_at_once(cache: Path) -> None:
    shard = cache / NAME / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert not is_intact(cache / NAME)
    assert outputs([start(cache), start(cache)]) == [str(cache / NAME)] * 2
    assert is_intact(cache / NAME)
    assert models(cache) == [NAME]


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "tokenizer.json"])
def test_a_missing_file_is_noticed_and_made_again(cache: Path, name: str) -> None:
    (cache / NAME / name).unlink()
    assert not is_intact(cache / NAME)
    assert is_intact(ensure_builtin(cache))


@pytest.mark.parametrize(
    "manifest", ["{", "[]", "\0", '{"files": {"config.json": {"nbytes": 0, "sha256": ""}, "a\\u0000": {}}}']
)
def test_a_damaged_manifest_is_noticed(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest.replace("{}", '{"nbytes": 0, "sha256": ""}'))
    (tmp_path / "config.json").touch()
    assert not is_intact(tmp_path)


def test_a_dead_build_is_cleared_away(cache: Path) -> None:
    (cache / f".{NAME}.build-dead").mkdir()
    (cache / NAME / "config.json").unlink()
    ensure_builtin(cache)
    assert models(cache) == [NAME]


def test_an_unwritable_cache_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.*free 115 MB"):
        ensure_builtin(tmp_path / "file")


def test_a_full_disk_is_refused_by_name_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builtin, "write_random_model", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        ensure_builtin(tmp_path)
    monkeypatch.setattr(builtin, "NEEDED_NBYTES", 1 << 60)
    with pytest.raises(ConfigError, match="MB are free"):
        ensure_builtin(tmp_path)
    assert models(tmp_path) == []


def test_the_platform_s_cache_directories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against the XDG base directory specification, and what Windows and macOS document."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    expected = {
        "linux": tmp_path / ".cache" / "slotstream",
        "darwin": tmp_path / "Library" / "Caches" / "slotstream",
        "win32": tmp_path / "local" / "slotstream" / "cache",
    }
    for platform, directory in expected.items():
        monkeypatch.setattr(sys, "platform", platform)
        assert builtin.cache_directory() == directory
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert builtin.cache_directory() == tmp_path / "xdg" / "slotstream"


def test_a_user_without_a_home_is_told_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(ConfigError, match=r"home directory.*XDG_CACHE_HOME.*--model"):
        builtin.cache_directory()


def test_the_command_prints_the_directory(cache: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "copyengine.checkpoint.builtin"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert is_intact(Path(done.stdout.strip()))
    assert done.stderr == ""
