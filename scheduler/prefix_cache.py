"""Which KV pages hold which beginnings of prompts and answers. Pure.

A radix tree whose edges are full pages: a node is one page of `page_tokens` tokens behind the pages of its ancestors.
So the path to it spells a prefix, and the KV in its page is that of these tokens at these positions. Only whole equal
pages match: two prompts that part inside a page share the pages before it. A new turn over a long prefix thus computes
its own tokens and up to a page of the last ones before them.

A request *holds* the path to one node, and whoever holds a node holds its ancestors. What nobody holds can be evicted,
least recently held first.

A node may have a snapshot of the recurrent state behind its prefix (`state_slots.py`). Of a model with such a state a
prefix can be used only up to a node that has one.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from scheduler.state_slots import Snapshot, StateSlots


class Node:
    """One cached page. `depth` counts it and its ancestors, `holders` are the requests that hold it."""

    __slots__ = ("children", "depth", "holders", "page", "parent", "snapshot", "tokens")

    def __init__(self, parent: "Node | None", tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[tuple[int, ...], Node] = {}
        self.holders = 0
        self.snapshot: Snapshot | None = None

    @property
    def has_state(self) -> bool:
        """Whether a request can go on from it that needs the state: one that starts at the root needs none."""
        return self.parent is None or (self.snapshot is not None and self.snapshot.usable)


class PrefixCache:
    """The tree. Pages come in by `add` and leave by `evict` or `discard`; in between they belong to it alone.

    `root` is the empty prefix: it has no page and is always there.
    """

    def __init__(self, page_tokens: int, states: StateSlots | None = None) -> None:
        """`states` are where snapshots are; without any, no node has one and none needs one."""
        self.root = Node(None, (), -1)
        self.size = 0  # pages in the tree
        self._page_tokens = page_tokens
        self._states = states or StateSlots(0)
        # Oldest first. A path is let go of from its end up, and whoever holds a node holds its ancestors: so a node
        # always comes behind its children here, and the first one is a leaf.
        self._unheld: OrderedDict[Node, None] = OrderedDict()

    @property
    def evictable(self) -> int:
        """Pages that nobody holds."""
        return len(self._unheld)

    def child(self, node: Node, tokens: Sequence[int]) -> Node | None:
        """The node behind `node` for the page that follows it in `tokens`, if that page is full and cached."""
        start = node.depth * self._page_tokens
        return node.children.get(tuple(tokens[start : start + self._page_tokens]))

    def longest(self, tokens: Sequence[int], above: Node | None = None) -> Node:
        """The end of the longest cached prefix of `tokens`, of full pages and never of all tokens.

        `above`, if given, is known to be on the way. At least one token stays to be computed: the next one is drawn
        from its logits.
        """
        node = above or self.root
        while (node.depth + 1) * self._page_tokens < len(tokens):
            child = self.child(node, tokens)
            if child is None:
                break
            node = child
        return node

    def usable(self, node: Node, above: Node | None = None) -> Node:
        """The last node on the path to `node`, not before `above`, that a request can go on from."""
        while self._states.total and node is not above and not node.has_state:
            assert node.parent
            node = node.parent
        return node

    def at(self, tokens: Sequence[int], position: int, beside: Node) -> Node | None:
        """The node of the first `position` of `tokens`, a whole number of pages, if it is cached.

        `beside` is known to be on the way there, or beyond.
        """
        depth = position // self._page_tokens
        node: Node | None = beside
        while node and node.depth > depth:
            node = node.parent
        while node and node.depth < depth:
            node = self.child(node, tokens)
        return node

    def held_depth(self, node: Node) -> int:
        """Pages on the path to `node` that somebody holds."""
        while node.parent and not node.holders:
            node = node.parent
        return node.depth

    def hold(self, node: Node, above: Node) -> list[int]:
        """Whoever holds `above` now holds `node` below it; the pages on the way, in order."""
        pages = []
        while node is not above:
            if not node.holders:
                del self._unheld[node]
            node.holders += 1
            pages.append(node.page)
            assert node.parent
            node = node.parent
        pages.reverse()
        return pages

    def release(self, node: Node) -> None:
        """A holder of `node` lets go of it and of all above it: they are its most recently used pages now."""
        while node.parent:
            node.holders -= 1
            if not node.holders:
                self._unheld[node] = None
            node = node.parent

    def discard(self, node: Node) -> list[int]:
        """As `release`, but what is thereby of no more use to anybody is taken out: the pages of that.

        Out goes the end of the path that nobody else holds. What has children stays: others have computed on from it.
        """
        pages = []
        while node.parent and node.holders == 1 and not node.children:
            pages.append(self._remove(node))
            node = node.parent
        self.size -= len(pages)
        self.release(node)
        return pages

    def add(self, node: Node, tokens: Sequence[int], page: int) -> Node:
        """`page` has the KV of the full page that follows `node` in `tokens`, which is not cached yet.

        The tree owns it from now on; who holds `node` holds it too.
        """
        start = node.depth * self._page_tokens
        child = Node(node, tuple(tokens[start : start + self._page_tokens]), page)
        assert len(child.tokens) == self._page_tokens and child.tokens not in node.children
        node.children[child.tokens] = child
        child.holders = 1
        self.size += 1
        return child

    def evict(self, count: int) -> list[int]:
        """Take the `count` pages out that nobody has held for longest; there must be as many that nobody holds."""
        pages = []
        for _ in range(count):
            node, _ = self._unheld.popitem(last=False)
            pages.append(self._remove(node))
        self.size -= count
        return pages

    def distrust(self, node: Node) -> None:
        """No request is to start from the state of `node` or of any above it."""
        while node.parent:
            if node.snapshot:
                self._states.forget(node.snapshot)
            node = node.parent

    def _remove(self, node: Node) -> int:
        """Take the leaf `node` out, and its snapshot; its page."""
        assert node.parent and not node.children
        del node.parent.children[node.tokens]
        if node.snapshot:
            self._states.forget(node.snapshot)
        return node.page

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, in no particular order."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.parent:
                yield node
