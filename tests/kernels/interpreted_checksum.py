"""A script: the checksum kernels in the interpreter against plain torch."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from tests.kernels.checksum_cases import check_all

check_all("cpu")
print("ok")
