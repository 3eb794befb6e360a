"""The prefix cache: finds blocks that already hold the keys and values of a prompt's beginning.

Keys and values at a position depend on every token up to it. So a block is named by a hash over its own tokens and
its parent's hash, and the same tokens behind another beginning have another name:

    tokens   [ 5 8 1 4 ]       [ 2 2 9 6 ]       [ 7 3 ]      (block_size 4; a block that is not full has no name)
    hash     a = h(0, 5814)    b = h(a, 2296)

A hash only proposes. A hit also compares the tokens, all the way up the chain, so that two prompts with equal hashes,
by chance or by malice, never share a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def hash_block(parent: int, tokens: tuple[int, ...]) -> int:
    """The chained hash of a full block; `parent` is the hash of the block before, 0 for the first one."""
    return hash((parent, tokens))


@dataclass(eq=False, slots=True)
class Entry:
    """A cached block. `parent` stays here after the parent itself was evicted: a hit is checked against it."""

    hash: int
    tokens: tuple[int, ...]
    parent: Entry | None
    block: int


def same_chain(a: Entry | None, b: Entry | None) -> bool:
    """True if both stand for the same tokens from the beginning. Mostly they are the same object."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens:
            return False
        a, b = a.parent, b.parent
    return True


class PrefixCache:
    """Which block holds which chain of tokens. It owns no blocks: the pool says when one is evicted."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._by_hash: dict[int, Entry] = {}
        self._by_block: dict[int, Entry] = {}  # twins too: blocks whose contents another block has entered first

    def __len__(self) -> int:
        return len(self._by_hash)

    def lookup(self, token_ids: Sequence[int]) -> list[int]:
        """The longest chain of cached blocks that these tokens begin with.

        At least one token stays uncovered, because a sequence needs the logits of its last token to go on.
        """
        blocks: list[int] = []
        parent = None
        for end in range(self.block_size, len(token_ids), self.block_size):
            tokens = tuple(token_ids[end - self.block_size : end])
            parent = self._match(self._name(parent, tokens), tokens, parent)
            if parent is None:
                break
            blocks.append(parent.block)
        return blocks

    def enter(self, block: int, tokens: Sequence[int], parent_block: int | None) -> bool:
        """Enter a full block whose keys and values are computed, after its parent (None: it is a first block).

        Returns:
            True if it is now the one to be found. False if an equal block came first, if another chain has the same
            hash, or if the parent was not entered, so that no lookup could come this far.
        """
        self._by_block.pop(block, None)  # what it stood for in an earlier life
        parent = None if parent_block is None else self._by_block.get(parent_block)
        if parent is None and parent_block is not None:
            return False
        tokens = tuple(tokens)
        name = self._name(parent, tokens)
        if name not in self._by_hash:
            self._by_hash[name] = self._by_block[block] = Entry(name, tokens, parent, block)
            return True
        twin = self._match(name, tokens, parent)
        if twin is not None:
            self._by_block[block] = twin
        return False

    def remove(self, block: int) -> None:
        """Forget a block that `enter` took, because it gets new contents."""
        entry = self._by_block.pop(block)
        del self._by_hash[entry.hash]

    def forget_twins(self) -> None:
        """After a time in which blocks were filled and not entered: a twin may hold something else by now.

        The block that is found has kept its contents, or `remove` was told.
        """
        self._by_block = {entry.block: entry for entry in self._by_hash.values()}

    @staticmethod
    def _name(parent: Entry | None, tokens: tuple[int, ...]) -> int:
        return hash_block(0 if parent is None else parent.hash, tokens)

    def _match(self, name: int, tokens: tuple[int, ...], parent: Entry | None) -> Entry | None:
        """The entry of this name, if it truly is these tokens behind this parent."""
        entry = self._by_hash.get(name)
        if entry is None or entry.tokens != tokens or not same_chain(entry.parent, parent):
            return None
        entry.parent = parent  # if the old parent was evicted and computed again: the next check is quick
        return entry
