"""A script: the spinning kernel in the interpreter, beside a thread that sets the flag."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import threading
import time

import torch

from kernels.flag_wait import tri

flags = torch.zeros(5, dtype=torch.int32)
flags[1], flags[4] = 2, -1
for index in (1, 4):  # set already, whatever to
    tri.spin_until_set(flags, index)

written_at: list[float] = []


def write() -> None:
    time.sleep(0.3)
    flags[1] = 0  # others are not looked at
    flags[2] = 7
    time.sleep(0.3)
    written_at.append(time.monotonic())
    flags[3] = 1


thread = threading.Thread(target=write)
thread.start()
tri.spin_until_set(flags, 3)
assert written_at and time.monotonic() >= written_at[0]
thread.join()
assert flags.tolist() == [0, 0, 7, 1, -1]
print("ok")
