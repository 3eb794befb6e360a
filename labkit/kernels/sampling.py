"""How the next token is drawn: penalties, temperature, filters, and noise that anybody can compute again.

The draw is Gumbel-max: argmax(logits / temperature + g) is distributed as softmax(logits / temperature) when every g
is -log(-log(u)) of an independent uniform u (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). Here u is no stream
of random numbers but a hash of (seed, choice, position, token id). So the same request draws the same token alone or
in a crowd, chunked, preempted or after a restart, and two sequences that weigh the same tokens share their noise.

    seed (64 bit), choice, position ──hash──▶ k0, k1                        one pair a row
    token * 0x9E3779B9 + k0 ──mix, keyed by k1──▶ 32 bits ──▶ v = 1 - u     one number a token

A row walks through the 2³² values of `mix` in steps of 0x9E3779B9: k0 says where it starts, k1 which `mix` it is. All
of it is 32-bit integer arithmetic that wraps around, which int32 tensors, Triton and CUDA do alike.

Letters: S sequences (rows that draw), V vocabulary, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import backend, native

GOLDEN = 0x9E3779B9 - 2**32  # 2³² / golden ratio as an int32: neighbouring ids land far apart
CANDIDATES = 1024  # how many of the best tokens top_k and top_p look at before they sort the whole vocabulary
CPU_PIECE = 65536  # numbers of noise that are made at once


def sample(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """Draws a token for each row. The order is: temperature, min_p, top_k, top_p, then the draw.

    Args:
        logits: [S, V] float32, after bias and penalties
        temperature: [S] float32; 0 takes the largest logit, the lowest id on a tie, whatever the filters say
        keys: [S, 2] int32, of `noise_keys`
        min_p, top_k, top_p: [S]; None: no row filters this way. Off are 0, 0 and 1.

    Returns:
        [S] int64
    """
    deterministic = temperature == 0
    scaled = logits / temperature.masked_fill(deterministic, 1).unsqueeze(1)
    if top_k is not None or top_p is not None:
        return _sample_sorted(scaled, deterministic, keys, min_p, top_k, top_p)
    if min_p is not None:
        scaled = filter_min_p(scaled, min_p)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    noise = gumbel_noise(keys, ids.unsqueeze(0)).masked_fill_(deterministic.unsqueeze(1), 0)
    return noise.add_(scaled).argmax(-1)


def _sample_sorted(
    scaled: Tensor,
    deterministic: Tensor,
    keys: Tensor,
    min_p: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
) -> Tensor:
    """`sample` for filters that need tokens in order: first among the best few, then what those cannot decide."""
    vocab = scaled.shape[1]
    # On a GPU, asking which rows are left would wait for it; sorting all at once is faster.
    few = CANDIDATES if scaled.device.type == "cpu" and vocab > CANDIDATES else vocab
    values, ids, complete = candidates(scaled, few, min_p, top_k, top_p)
    tokens = _draw(values, ids, deterministic, keys)
    if few < vocab:
        left = (~(complete | deterministic)).nonzero().squeeze(1)
        if len(left):
            filters = (None if x is None else x[left] for x in (min_p, top_k, top_p))
            values, ids, _ = candidates(scaled[left], vocab, *filters)
            tokens[left] = _draw(values, ids, deterministic[left], keys[left])
    return tokens


def _draw(values: Tensor, ids: Tensor, deterministic: Tensor, keys: Tensor) -> Tensor:
    """The largest of logit + noise among candidates [S, C]; of equals the lowest id, as argmax over V would have it."""
    total = gumbel_noise(keys, ids.int()).masked_fill_(deterministic.unsqueeze(1), 0).add_(values)
    best = total == total.amax(-1, keepdim=True)
    return ids.masked_fill(~best, torch.iinfo(ids.dtype).max).amin(-1)


def greedy(logits: Tensor) -> Tensor:
    """The largest logit of each row [S, V], the lowest id on a tie -> [S] int64."""
    if backend.on_cpp(logits) and logits.stride(1) == 1:
        return native.argmax(logits)
    if logits.device.type == "cpu":  # NumPy's is vectorised, PyTorch's is not: 0.05 ms for [8, 49152] instead of 0.6
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def filter_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Cuts tokens whose probability is below min_p [S] times the best one's; logits are [S, V]."""
    floor = logits.amax(-1) + min_p.log()  # log 0 = -inf cuts nothing
    return logits.masked_fill(logits < floor.unsqueeze(1), -torch.inf)


def candidates(
    logits: Tensor, count: int, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that survive the filters, looked for among the `count` best of [S, V].

    Returns:
        (logits, ids), both [S, count], best first, -inf for a token that is cut; and [S] bool: True where nothing
        that the filters keep is missing.
    """
    values, ids = best_first(logits, count)
    kept, complete = _filter_sorted(logits, values, min_p, top_k, top_p)
    return kept, ids, complete


def best_first(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row [S, V] and their ids, equal ones by id, lowest first -> two [S, count]."""
    vocab = logits.shape[1]
    if count == vocab:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    if logits.device.type == "cpu":
        # topk takes any of several equal logits, which matters only if it left some of them out. Seldom so; then below.
        values, ids = logits.topk(count, dim=-1)
        if bool(((logits >= values[:, -1:]).sum(-1) == count).all()):
            ids = ids.sort(dim=-1).values
            values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
            return values, ids.gather(1, order)
    # A sort key that holds both: the logit's bits, ordered as integers are, above the inverted id.
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    key = (ordered << 32) + torch.arange(vocab - 1, -1, -1, device=logits.device)
    ids = (vocab - 1) - (key.topk(count, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(1, ids), ids


def _filter_sorted(
    logits: Tensor, values: Tensor, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cuts `values` [S, C], the best of `logits` [S, V] in order.

    Returns:
        (values with -inf where cut, [S] bool: True if nothing that the filters keep is missing from the C).
    """
    count, best = values.shape[1], values[:, :1]
    floor = torch.full_like(best, -torch.inf) if min_p is None else best + min_p.log().unsqueeze(1)
    keep = values >= floor
    limit = torch.full_like(best, logits.shape[1], dtype=torch.int64)
    if top_k is not None:
        limit = torch.where(top_k > 0, top_k, limit.squeeze(1)).unsqueeze(1)
        keep &= torch.arange(count, device=values.device) < limit
    complete = (limit <= count) | (values[:, -1:] < floor) | (count == logits.shape[1])
    if top_p is not None:
        weights = (values - best).exp_() * keep
        total = weights.sum(-1, keepdim=True)
        if count < logits.shape[1]:
            everything = torch.where(logits >= floor, logits - best, -torch.inf).exp_().sum(-1, keepdim=True)
            total = torch.where(complete, total, everything)
        before = weights.cumsum(-1) - weights
        target = top_p.unsqueeze(1) * total
        keep &= (before < target) | (top_p == 1).unsqueeze(1)
        # Rows whose k is beyond the C would need their total from a longer sort.
        reached = ((before + weights)[:, -1:] >= target) & (top_p < 1).unsqueeze(1) & (limit == logits.shape[1])
        complete = complete | reached
    keep[:, 0] = True  # rounding must never leave a row without any
    return values.masked_fill(~keep, -torch.inf), complete.squeeze(1)


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Makes tokens that have been seen less (or more) likely.

    Repetition (Keskar et al. 2019, arXiv:1909.05858) divides a positive logit and multiplies a negative one, for
    tokens of prompt and output; presence and frequency (OpenAI's) are subtracted for tokens of the output alone.

    Args:
        logits: [S, V] float32
        seen: [S, V] bool, tokens that are in prompt or output
        counts: [S, V] int, how often each token is in the output
        repetition, presence, frequency: [S] float32; off are 1, 0 and 0

    Returns:
        [S, V], a new tensor
    """
    factor = torch.where(seen, repetition.unsqueeze(1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits -= presence.unsqueeze(1) * (counts > 0)
    return logits.sub_(frequency.unsqueeze(1) * counts)


def noise_keys(seed_words: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """Two 32-bit keys for each row, out of everything the draw depends on but the token.

    Args:
        seed_words: [S, 2] int32, low and high half of the 64-bit seed
        choices: [S] int32, which answer of the request it is
        positions: [S] int32, index of the drawn token in prompt and output as one sequence

    Returns:
        [S, 2] int32
    """
    low, high = seed_words.unbind(1)
    first = mix(mix(low ^ 0x243F6A88) + high)  # digits of pi: any constants do, as long as they differ
    second = mix(mix(high ^ 0x13198A2E) + low)
    where = mix(mix(positions * GOLDEN + choices) ^ 0x03707344)
    return torch.stack((mix(first + where), mix(second ^ where)), dim=1)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise for tokens.

    Args:
        keys: [S, 2] int32
        token_ids: [S, C] or [1, C] int32

    Returns:
        [S, C] float32, between -2.9 and 16.7
    """
    rows, columns = keys.shape[0], token_ids.shape[1]
    noise = torch.empty(rows, columns, dtype=torch.float32, device=keys.device)
    # On a CPU a piece stays in the cache from the first operation to the last: twice as fast as one after the other.
    width = max(1, CPU_PIECE // max(rows, 1)) if keys.device.type == "cpu" else max(columns, 1)
    for begin in range(0, columns, width):
        x = mix(token_ids[:, begin : begin + width] * GOLDEN + keys[:, :1], keys[:, 1:])
        # v is the upper 23 bits and a half, and u is 1 - v: both exact in float32, never 0 and never 1.
        u = shift_right(x, 9).float().mul_(-(2.0**-23)).add_(1 - 2.0**-24)
        torch.neg(u.log_().neg_().log_(), out=noise[:, begin : begin + width])
    return noise


def mix(x: Tensor, key: Tensor | int = 0) -> Tensor:
    """A bijection of int32 in which every input bit moves every output bit (lowbias32, Chris Wellons 2018).

    With a key, another bijection as good: what the first half made of x is moved by it before the second half.
    """
    x = x ^ shift_right(x, 16)
    x = x.mul_(0x7FEB352D)
    x ^= shift_right(x, 15)
    x ^= key
    x = x.mul_(0x846CA68B - 2**32)
    x ^= shift_right(x, 16)
    return x


def shift_right(x: Tensor, bits: int) -> Tensor:
    """The logical shift: int32 as if it were unsigned, zeros come in from the left."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def log_probabilities(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the model itself thinks of a token, and of the k best ones.

    Args:
        logits: [S, V] float32, raw
        tokens: [S] int64

    Returns:
        (log-probability [S], rank [S] with 1 for the most likely, ids [S, k], their log-probabilities [S, k])
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, tokens.unsqueeze(1))
    rank = (logits > own).sum(-1) + 1
    values, ids = best_first(logits, k) if k else (logits[:, :0], tokens[:, None][:, :0])
    return (own - normaliser).squeeze(1), rank, ids, values - normaliser
