"""What loading takes, in a process of its own: by what the kernel counts of that process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from copyengine.checkpoint.random_model import Sizes
from tests.copyengine.sparse_checkpoint import write_sparse_checkpoint

SIZES = Sizes(
    layers=6,
    hidden=512,
    intermediate=256,
    experts=64,
    experts_per_token=2,
    heads=2,
    kv_heads=1,
    vocab_size=64,
    shards=3,
)
"""302 MB of experts in bfloat16."""

LOAD = """
import json, sys
from copyengine.device.host import HostCopyDevice
from copyengine.loading import _load, _Meter
from copyengine.protocol import Load
import copyengine.checkpoint.reader

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

def read_nbytes():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("rchar"))

device = HostCopyDevice()
before, read_before = status("VmRSS"), read_nbytes()
banks = _load(device, "peak", Load(sys.argv[1], sys.argv[2]), _Meter())[0]
print(json.dumps([banks.nbytes, status("VmHWM") - before, read_nbytes() - read_before]))
banks.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux'")
@pytest.mark.parametrize(
    ("stored", "dtype", "quantised", "fused"),
    [
        ("bfloat16", "bfloat16", False, False),
        ("float32", "bfloat16", False, True),
        ("bfloat16", "bfloat16", True, False),
    ],
)
def test_loading_takes_banks_and_a_shard_and_reads_each_shard_once(
    tmp_path: Path, stored: str, dtype: str, quantised: bool, fused: bool
) -> None:
    """Its resident memory at its highest, page cache left out, banks in it; and the bytes that reads returned to it,
    headers, index and config.json included. Of tensors that hold a layer's experts, too."""
    paths = write_sparse_checkpoint(tmp_path / "model", replace(SIZES, fused_experts=fused), stored, quantised)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "model"), dtype], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    banks, peak, read = json.loads(done.stdout)
    stored_nbytes = sum(path.stat().st_size for path in paths)
    shard = max(path.stat().st_size for path in paths)
    assert banks >= 80e6 and banks < peak <= banks * 1.1 + shard
    assert 0.97 * stored_nbytes < read < 1.03 * stored_nbytes
