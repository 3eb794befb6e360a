"""The block pool: which block of the KV cache is whose. Numbers only; the keys and values live in the runner.

        take                      give_back                  give_back
free ─────────► in use ─┬─ not worth keeping ─► free
  ▲               ▲     └─ kept (a prompt may ask for it again) ─► cached
  │               └───────────────── share ──────────────────────────┤
  └──────────────────────────── take, when free is empty: evict ─────┘

total = free + cached + in use, always. Every operation is O(1) a block.
Source: PagedAttention, https://arxiv.org/abs/2309.06180, section 4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks 0 to num_blocks - 1, each with the number of sequences that use it.

    Args:
        num_blocks: size of the pool.
        on_evict: called with each cached block that is about to get new contents.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None):
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._users = [0] * num_blocks
        self._kept = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is handed out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses but whose contents may still be asked for."""
        return len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """How many blocks `take` can hand out now."""
        return len(self._free) + len(self._cached)

    def num_users(self, block: int) -> int:
        return self._users[block]

    def users(self) -> Sequence[int]:
        """The number of users of each block, in order."""
        return self._users

    def cached(self) -> Iterable[int]:
        """The cached blocks, the first to be evicted first."""
        return self._cached.keys()

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks with one user each: free ones first, then the least recently used cached ones.

        Raises:
            ValueError: there are not so many; nothing was taken.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} available; check num_available first")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._kept[block] = False
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks, which are in use or cached."""
        for block in blocks:
            if self._users[block] == 0:
                del self._cached[block]
            self._users[block] += 1

    def keep(self, block: int) -> None:
        """From now on this block, which is in use, becomes cached rather than free when its last user leaves."""
        assert self._users[block] > 0, f"block {block} is kept but not in use"
        self._kept[block] = True

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take a user from each of these blocks, given in order of position.

        The last goes first: the end of a chain is evicted before its beginning, which more prompts share.
        """
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} is given back twice"
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._kept[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)
