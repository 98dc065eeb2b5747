"""Standard input, output and error where whoever started us closed one."""

import os
import sys

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}
"""In the order of their descriptors: 0, 1 and 2."""


def open_closed_streams() -> None:
    """Have what is closed of descriptors 0, 1 and 2, or missing in `sys`, lead nowhere. Before anything else is opened.

    A socket that got such a number would be taken for the stream by the event loop and by processes that are started.
    """
    for descriptor, mode in enumerate(MODES.values()):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
    for name, mode in MODES.items():  # all numbers are taken by now: none of these files gets one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
