"""QK-norm, RoPE, KV store and attention of a few decodes in one kernel, against the operations it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.kernels import backend, cuda, few_decodes, qkv_rope
from labkit.kernels.attention_batch import AttentionBatch

from .test_attention import want_decodes

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
NEAR = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [(16, 8, 128), (32, 8, 64), (7, 1, 128), (9, 3, 64), (8, 8, 128), (16, 2, 64)]  # H, K, D
LENGTHS = [[1], [0, 2, 16, 17], [512, 513, 1, 800, 33, 1029, 64, 65]]


@pytest.fixture(autouse=True)
def there() -> None:
    torch.manual_seed(0)
    reason = backend.without_few_rows(DEVICE)
    if reason is not None or torch.cuda.get_device_capability(DEVICE) < cuda.HOPPER:
        pytest.skip(f"clusters of blocks do not run here: {reason}")
    backend.use(backend.FASTEST)


class Layer:
    """A pool, and decodes whose blocks are scattered over it. Where nothing is stored yet there is nan."""

    def __init__(
        self, shape: tuple[int, int, int], lengths: list[int], dtype: torch.dtype, norm: bool, block_size: int = 16
    ):
        heads, kv_heads, head_dim = shape
        width = -(-max(lengths) // block_size) + 1
        blocks = len(lengths) * width + 1  # the last one is scratch
        tables = torch.randperm(blocks - 1)[: len(lengths) * width].view(len(lengths), width).int()
        pool = torch.full((2, blocks, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
        slots = []
        for table, length in zip(tables, lengths, strict=True):
            at = torch.arange(max(length, 1))
            places = table.long()[at // block_size] * block_size + at % block_size
            slots.append(int(places[-1]) if length else (blocks - 1) * block_size)
            pool.flatten(1, 2)[:, places[: max(length - 1, 0)]] = torch.randn(
                2, max(length - 1, 0), kv_heads, head_dim
            ).to(dtype)
        lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.pool = pool.to(DEVICE)
        self.batch = AttentionBatch(torch.tensor(slots, device=DEVICE), tables.to(DEVICE), lens, max(lengths))
        self.positions = (lens - 1).clamp(min=0)
        self.cos_sin = torch.randn(max(lengths) + 1, head_dim, device=DEVICE)
        self.norms: list[Tensor | None] = [None, None]
        if norm:
            self.norms = list(torch.randn(2, head_dim, device=DEVICE).to(dtype).unbind())
        row = (heads + 2 * kv_heads) * head_dim
        self.qkv = torch.randn(len(lengths), row + 8, device=DEVICE).to(dtype)[:, :row]
        torch.cuda.synchronize()  # the kernel reads before the one in front of it has ended

    def run(self, window: int | None = None, cluster: int | None = None) -> Tensor:
        caches = self.pool.unbind(0)
        assert few_decodes.takes_few_decodes(self.qkv, self.positions, *caches, self.batch)
        return few_decodes.few_decodes(
            self.qkv, self.positions, self.cos_sin, *caches, self.batch, *self.norms, window=window, cluster=cluster
        )

    def want(self, window: int | None) -> tuple[Tensor, Tensor]:
        """What the operations one by one give, and leave in the pool."""
        pool = self.pool.clone()
        k, v = pool.unbind(0)
        q = qkv_rope.norm_rope_store(self.qkv, self.positions, self.cos_sin, k, v, self.batch.slot_mapping, *self.norms)
        pool[:, -1] = torch.nan  # scratch
        seen = pool.nan_to_num()
        return want_decodes(q, *seen.unbind(0), self.batch.block_tables, self.batch.context_lens, window), pool


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_decodes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for lengths in LENGTHS:
        for window, cluster, norm in ((None, None, True), (20, 1, False), (300, 8, True), (None, 4, False)):
            layer = Layer(shape, lengths, dtype, norm)
            want, pool = layer.want(window)
            got = layer.run(window, cluster)
            torch.testing.assert_close(got.float(), want, atol=NEAR[dtype], rtol=0)
            torch.testing.assert_close(layer.pool, pool, atol=NEAR[dtype], rtol=NEAR[dtype], equal_nan=True)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_blocks_of_any_size(block_size: int) -> None:
    layer = Layer((8, 2, 64), [5, 130], torch.float16, norm=True, block_size=block_size)
    want, _ = layer.want(None)
    torch.testing.assert_close(layer.run().float(), want, atol=NEAR[torch.float16], rtol=0)


def test_results_repeat() -> None:
    layer = Layer((16, 8, 128), [900, 3, 77], torch.bfloat16, norm=True)
    first = layer.run()
    assert all(torch.equal(first, layer.run()) for _ in range(20))


def test_one_step_after_the_other() -> None:
    """Each launch may begin while the one before it runs, and still sees what that one has stored."""
    layer = Layer((16, 8, 128), [40, 41], torch.bfloat16, norm=True)
    want, pool = layer.want(None)
    wide, qkv = torch.randn(4096, 4096, device=DEVICE), layer.qkv.clone()
    for _ in range(3):
        layer.qkv.zero_()
        layer.qkv.copy_(qkv + 0 * (wide @ wide)[0, 0])  # slow
        torch.testing.assert_close(layer.run().float(), want, atol=NEAR[torch.bfloat16], rtol=0)
    torch.testing.assert_close(layer.pool, pool, atol=3e-2, rtol=3e-2, equal_nan=True)


def test_what_it_does_not_take_goes_elsewhere() -> None:
    good = Layer((16, 8, 128), [4, 5], torch.bfloat16, norm=False)
    k, v = good.pool.unbind(0)
    takes, batch = few_decodes.takes_few_decodes, good.batch
    assert takes(good.qkv, good.positions, k, v, batch)
    assert not takes(good.qkv, good.positions.long(), k, v, batch)
    assert not takes(good.qkv.float(), good.positions, k.float(), v.float(), batch)
    assert not takes(good.qkv, good.positions, k[:, :, :, 1:], v[:, :, :, 1:], batch)
    assert not takes(torch.cat([good.qkv] * 2), good.positions, k, v, batch)  # a prompt's rows
    many = Layer((16, 8, 128), [4] * (few_decodes.MOST + 1), torch.bfloat16, norm=False)
    assert not takes(many.qkv, many.positions, *many.pool.unbind(0), many.batch)
    wide = Layer((18, 2, 64), [4], torch.bfloat16, norm=False)  # nine query heads a key/value head
    assert not takes(wide.qkv, wide.positions, *wide.pool.unbind(0), wide.batch)
    backend.use(backend.FASTEST, True)
    assert not takes(good.qkv, good.positions, k, v, batch)
    backend.use("triton")
    assert not takes(good.qkv, good.positions, k, v, batch)
