"""The end of a run that finishes what its clients asked for: who is still at it, and how it went. Pure."""

from collections.abc import Iterable

from copyengine.wire.child import Exited, Said, Told
from copyengine.wire.deaths import how_it_ended


class Draining:
    """The processes that were asked to finish what runs. Each ends by itself with exit code 0 when it has."""

    def __init__(self, asked: Iterable[str]) -> None:
        self.code = 0
        """The run's exit code: 1 if a process ended otherwise than it should."""
        self.hurried = False
        """Whether a second signal came."""
        self._left = set(asked)

    @property
    def over(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return self.hurried or not self._left

    def take(self, notice: Said | Exited | Told, expected: bool = False) -> str:
        """Something was heard; what is to be said of it, if anything. `expected`: this process was told to end."""
        match notice:
            case Told():  # a second signal: at once
                self.hurried = True
            case Exited(name=name, code=code):
                finished = code == 0 and name in self._left
                self._left.discard(name)
                if not finished and not expected:
                    self.code = 1
                    return f"{name} {how_it_ended(code)} while draining"
        return ""
