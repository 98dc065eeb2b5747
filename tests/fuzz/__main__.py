"""`python -m tests.fuzz TARGET [libFuzzer's flags]`: atheris feeds one target until it finds something, or its flags
end it (`-runs=N`, `-max_total_time=S`). Needs the extra `fuzz`."""

import importlib
import sys

import atheris

from tests.fuzz.targets import TARGETS


def main(argv: list[str]) -> None:
    if len(argv) < 2 or argv[1] not in TARGETS:
        sys.exit(f"python -m tests.fuzz TARGET [-runs=N] [-max_total_time=S]; targets: {', '.join(TARGETS)}")
    with atheris.instrument_imports(include=["copyengine", "scheduler", "tests.fuzz"]):
        target = importlib.import_module(f"tests.fuzz.{argv[1]}")
    atheris.Setup([argv[0], *argv[2:]], target.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
