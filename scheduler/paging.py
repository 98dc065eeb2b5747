"""KV pages: who has which. Pure."""


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_tokens)


class PageAllocator:
    """Hands out pages 0 .. total - 1, each to one owner at a time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owned = [False] * total

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing allocated) if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owned[page] = True
        return pages

    def release(self, pages: list[int]) -> None:
        """Take pages back. ValueError for one that is not out, before anything changes."""
        if len(set(pages)) != len(pages) or not all(0 <= page < self.total and self._owned[page] for page in pages):
            raise ValueError(f"pages {pages} are not all owned")
        for page in pages:
            self._owned[page] = False
        self._free.extend(reversed(pages))
