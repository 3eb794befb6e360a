"""The CUDA C++ operations on a GPU, against their PyTorch definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.errors import KernelError
from labkit.kernels import attention, backend, cuda, prefill_attention, rms_norm
from labkit.kernels.attention_batch import AttentionBatch, PromptChunk
from labkit.kernels.tiles import CUDA_TILE, PrefillTile
from labkit.models.decoder import Decoder, DecoderBatch
from tests.unit.models.test_decoder import config_of, reference, weights_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
NEAR = {torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative error: half a step of the last place, and of the weights'
STARTS, LENGTHS = [0, 0, 13, 16, 30, 600], [1, 17, 400, 33, 0, 300]


@pytest.fixture(autouse=True)
def there() -> None:
    torch.manual_seed(0)
    reason = backend.unavailable("cuda", DEVICE)
    if reason is not None:
        pytest.skip(f"the cuda backend does not run here: {reason}")


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def strided(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width + 5, device=DEVICE).to(dtype)[:, 2 : width + 2]


@pytest.mark.parametrize("dtype", cuda.DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 17, 128, 576, 1000, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("rows", [0, 1, 3, 1000])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    near = {"rtol": 2e-3, "atol": 1e-5} if dtype == torch.float16 else {}  # two roundings to different sides
    for make in (strided, lambda *args: strided(*args).clone(memory_format=torch.contiguous_format)):
        if make is strided and width > cuda.MAX_UNALIGNED_WIDTH:
            continue
        x, weight = make(rows, width, dtype), torch.randn(width, device=DEVICE).to(dtype)
        torch.testing.assert_close(cuda.rms_norm(x, weight, 1e-5), rms_norm.rms_norm(x, weight, 1e-5), **near)
        residual = make(rows, width, dtype)
        ours = residual.clone()
        want, _ = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
        got, stream = cuda.add_rms_norm(x, ours, weight, 1e-5)
        torch.testing.assert_close(got, want, **near)
        assert stream is ours and torch.equal(ours, residual)


def test_norm_of_heads_and_its_limits() -> None:
    x, weight = torch.randn(7, 9, 5, 128, device=DEVICE).bfloat16(), torch.randn(128, device=DEVICE).bfloat16()
    for given in (x, x[0], x[0, :, :3], x[0, 0], x[0, 0, 0]):
        torch.testing.assert_close(cuda.rms_norm(given, weight, 1e-6), rms_norm.rms_norm(given, weight, 1e-6))
    with pytest.raises(KernelError, match="8192"):
        cuda.rms_norm(strided(2, 8193, torch.float16), torch.ones(8193, device=DEVICE).half(), 1e-6)
    with pytest.raises(KernelError, match="side by side"):
        cuda.rms_norm(x[0, 0].t(), weight[:5], 1e-6)
    with pytest.raises(KernelError, match="one floating-point type"):
        cuda.rms_norm(x, weight.float(), 1e-6)


def check_prompts(
    starts: list[int],
    lengths: list[int],
    heads: int,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    window: int | None,
    spread: float = 1.0,
) -> None:
    """Chunks at the ends of their sequences; queries and results strided, and rows of padding behind."""
    _, block_size, kv_heads, head_dim = k.shape
    rows = sum(lengths) + 5
    q = (spread * torch.randn(rows, heads + 2, head_dim, device=DEVICE)).to(k.dtype)[:, :heads]
    ends = ints(starts) + ints(lengths)
    prompts = prefill_attention.make_prompts(CUDA_TILE, heads // kv_heads, rows, tables, ints(lengths), ends)
    out = torch.full((rows, heads + 2, head_dim), 9.0, dtype=k.dtype, device=DEVICE)
    cuda.flash_attention(q, k, v, prompts, window, out=out[:, :heads])
    assert (out[-5:] == 9).all() and (out[:, heads:] == 9).all()
    row = 0
    for table, start, length in zip(tables, starts, lengths, strict=True):
        if length:
            blocks = table[: -(-(start + length) // block_size)]
            batch = AttentionBatch(torch.empty(0), tables[:0], torch.empty(0), 0)
            chunk = PromptChunk(0, start, length, torch.arange(len(blocks), device=DEVICE))
            keys, values = (cache[blocks].float().nan_to_num() for cache in (k, v))
            want = prefill_attention.chunk_attention(q[row : row + length].float(), keys, values, batch, chunk, window)
            error = (out[row : row + length, :heads].float() - want).norm() / want.norm()
            assert error < NEAR[k.dtype], (start, length, float(error))
        row += length


def pool(blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, side by side as the runner has them."""
    both = torch.randn(2, blocks, block_size, kv_heads, head_dim, device=DEVICE).to(dtype)
    return both[0], both[1]


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("head_dim", cuda.HEAD_DIMS)
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (16, 8), (7, 1), (9, 3), (40, 1), (128, 1)])
def test_prompts(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for block_size in (8, 16, 24, 256):
        width = -(-900 // block_size)
        k, v = pool(6 * width, block_size, kv_heads, head_dim, dtype)
        tables = torch.randperm(6 * width, device=DEVICE).view(6, width).int()
        for window in (None, 1, 64, 100, 5000):
            check_prompts(STARTS, LENGTHS, heads, k, v, tables, window)


@pytest.mark.parametrize("spread", [0.0, 10.0, 100.0])
def test_flat_and_sharp_scores(spread: float) -> None:
    """All weights alike, or one key that counts: then the largest score moves far, and often."""
    k, v = pool(60, 16, 8, 128, torch.bfloat16)
    check_prompts([100], [800], 16, k, v, torch.randperm(60, device=DEVICE).view(1, 60).int(), None, spread)


def test_what_lies_behind_a_sequence_is_not_read() -> None:
    k, v = pool(2, 16, 2, 128, torch.bfloat16)
    k[1, 5:], v[1, 5:] = float("nan"), float("nan")
    check_prompts([0], [21], 4, k, v, ints([0, 1]).view(1, 2), None)


def test_no_chunk_and_no_row() -> None:
    k, v = pool(4, 16, 2, 128, torch.bfloat16)
    tables = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    for rows in (0, 5):
        q = torch.randn(rows, 4, 128, dtype=torch.bfloat16, device=DEVICE)
        prompts = prefill_attention.make_prompts(CUDA_TILE, 2, rows, tables, ints([0, 0]), ints([0, 0]))
        out = torch.full_like(q, 9.0)
        cuda.flash_attention(q, k, v, prompts, out=out)
        assert (out == 9).all()


def test_a_pool_beyond_two_to_the_31() -> None:
    """140,000 blocks of 16,384 numbers: 2.3e9 for keys and as many for values."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    blocks = 140_000
    k, v = (torch.empty(blocks, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    last = torch.arange(blocks - 6 * 60, blocks, device=DEVICE)
    k[last], v[last] = pool(6 * 60, 16, 8, 128, torch.bfloat16)
    check_prompts(STARTS, LENGTHS, 16, k, v, last[torch.randperm(6 * 60, device=DEVICE)].view(6, 60).int(), None)


def test_a_graph_holds_them() -> None:
    """Recorded once, replayed with other chunks of the same number of rows."""
    backend.use("cuda")
    k, v = pool(2 * 63, 16, 8, 128, torch.bfloat16)
    tables = torch.randperm(2 * 63, device=DEVICE).view(2, 63).int()
    x, weight = torch.randn(64, 2048, device=DEVICE).bfloat16(), torch.ones(2048, device=DEVICE).bfloat16()
    lengths, ends = ints([30, 34]), ints([30, 34])

    def step() -> Tensor:
        q = rms_norm.rms_norm(x, weight, 1e-6).view(64, 16, 128)
        prompts = prefill_attention.make_prompts(CUDA_TILE, 2, 64, tables, lengths, ends)
        batch = AttentionBatch(torch.empty(0), tables[:0], ends[:0], 0, prompts=prompts)
        return attention.paged_attention(q, k, v, batch)

    step()  # built and loaded before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for now in ([30, 34], [1, 63], [0, 64]):
        lengths.copy_(ints(now))
        ends.copy_(lengths + 500)
        got.zero_()
        graph.replay()
        assert torch.equal(got, step()) and got.abs().sum() > 0


def test_refuses_what_it_cannot_do() -> None:
    k, v = pool(8, 16, 2, 128, torch.bfloat16)
    tables, lengths = ints([0, 1]).view(1, 2), ints([20])

    def attend(q: Tensor, k: Tensor, v: Tensor, tile: PrefillTile = CUDA_TILE) -> None:
        prompts = prefill_attention.make_prompts(tile, 2, 20, tables, lengths, lengths)
        cuda.flash_attention(q, k, v, prompts)

    q = torch.randn(20, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    attend(q, k, v)
    with pytest.raises(KernelError, match="float16 or bfloat16"):
        attend(q.float(), k.float(), v.float())
    with pytest.raises(KernelError, match="64 or 128"):
        attend(q[..., :80], k[..., :80], v[..., :80])
    with pytest.raises(KernelError, match="multiple of 8"):
        attend(q, k[:, :12], v[:, :12])
    with pytest.raises(KernelError, match="same order"):
        attend(q, k, v.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(KernelError, match="128 rows"):
        attend(q, k, v, PrefillTile(64, 64, 4, 2))


@torch.inference_mode()
def test_a_model_on_them_agrees_with_pytorch() -> None:
    """One prompt of 100 tokens, two layers with QK-norm: the same scores but for roundings."""
    model = reference("qwen3", head_dim=64).to(DEVICE, torch.bfloat16)
    tokens = torch.randint(101, (100,), device=DEVICE)
    table = torch.tensor([5, 0, 3, 6, 1, 2, 4], dtype=torch.int32, device=DEVICE)
    positions = torch.arange(100, device=DEVICE)
    slots = table.long()[positions // 16] * 16 + positions % 16
    scores = []
    for kernels in ("torch", "cuda"):
        decoder = Decoder(config_of(model), weights_of(model), 256, kernels)
        assert decoder.fused == (kernels == "cuda")
        tile, prompts = decoder.prefill_tile, None
        if tile is not None:
            prompts = prefill_attention.make_prompts(tile, 3, 100, table.unsqueeze(0), ints([100]), ints([100]))
        chunks = [PromptChunk(0, 0, 100, table)]
        batch = AttentionBatch(slots, table.view(1, 7)[:0], ints([]), 0, chunks, prompts)
        cache = torch.zeros(2, 2, 7, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE)
        hidden = decoder.forward(DecoderBatch(tokens, positions.int(), batch), cache)
        scores.append(decoder.logits(hidden).float().log_softmax(-1))
    assert (scores[0] - scores[1]).abs().mean() < 0.05
