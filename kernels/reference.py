"""Plain-torch kernels: the specification of every operation, and the fallback without Numba.

Arguments are described once, in `tierstore.kernels`.
"""

import math

import torch

from tierstore.kernels.element import Array, to_tensor
from tierstore.kernels.rotary import rotate
from tierstore.kernels.shape import BlockShape

_PRODUCTS = 1 << 24
"""Products of points and centroids that are held at once."""


def attend_blocks(
    query: Array,
    pool: Array,
    shape: BlockShape,
    row_ptr: Array,
    slots: Array,
    valid: Array,
    strip_key: Array,
    strip_value: Array,
    strip_length: Array,
    scale: float,
    out: Array,
    lse: Array,
    *,
    merge: bool,
) -> None:
    q, blocks, keys, values = (to_tensor(a) for a in (query, pool, strip_key, strip_value))
    result, sums = to_tensor(out), to_tensor(lse)
    at = to_tensor(slots).to(q.device, torch.int64)
    live = torch.arange(shape.tokens, device=q.device) < to_tensor(valid).to(q.device)[:, None]
    for row in range(q.shape[0]):
        chosen = slice(int(row_ptr[row]), int(row_ptr[row + 1]))
        picked = blocks[at[chosen]]
        k, v = shape.keys_and_values(picked)
        mask = live[chosen].reshape(-1)
        strip = slice(0, int(strip_length[row]))
        k = torch.cat([k.reshape(-1, shape.key_dim)[mask], keys[row, strip]]).float()
        v = torch.cat([v.reshape(-1, shape.value_dim)[mask], values[row, strip]]).float()
        part, part_lse = partial_attention(q[row].float() * scale, k, v)
        if merge:
            part, part_lse = merge_partials(result[row].float(), sums[row], part, part_lse)
        result[row] = part.to(result.dtype)
        sums[row] = part_lse


def partial_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one set of keys, and its log-sum-exp, so that sets can be merged.

    query [..., T, d] (already scaled), key [..., n, d], value [..., n, e], mask [T, n] True =
    visible. Returns [..., T, e] and [..., T]; a query that sees nothing gets zeros and -inf.
    """
    logits = query @ key.transpose(-1, -2)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    if logits.shape[-1] == 0:
        empty = query.new_zeros(*query.shape[:-1], value.shape[-1])
        return empty, query.new_full(query.shape[:-1], -math.inf)
    peak = logits.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weights = torch.exp(logits - peak)
    total = weights.sum(-1)  # At least 1, or 0 where nothing is seen.
    return weights @ value / total.clamp(min=1)[..., None], peak[..., 0] + total.log()


def merge_partials(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the attention over each."""
    lse = torch.logaddexp(first_lse, second_lse)
    safe = lse.masked_fill(lse.isneginf(), 0.0)
    a, b = torch.exp(first_lse - safe)[..., None], torch.exp(second_lse - safe)[..., None]
    return a * first + b * second, lse


def attend_low_rank(
    query: Array,
    left: Array,
    right: Array,
    cos: Array,
    sin: Array,
    pool: Array,
    shape: BlockShape,
    row_ptr: Array,
    blocks: Array,
    slots: Array,
    valid: Array,
    scale: float,
    out: Array,
    lse: Array,
    *,
    merge: bool,
) -> None:
    q, all_blocks, u, factors = (to_tensor(a) for a in (query, pool, left, right))
    turn, result, sums = (to_tensor(cos), to_tensor(sin)), to_tensor(out), to_tensor(lse)
    heads = len(factors) // len(u)
    of = torch.arange(shape.tokens)
    for row in range(q.shape[0]):
        chosen = slice(int(row_ptr[row]), int(row_ptr[row + 1]))
        live = of < to_tensor(valid)[chosen, None].cpu()
        tokens = (to_tensor(blocks)[chosen, None].cpu() * shape.tokens + of)[live].to(q.device)
        k = u[row // heads, tokens].float() @ factors[row].float()
        k = rotate(k, turn[0][tokens], turn[1][tokens])
        values = shape.values(all_blocks[to_tensor(slots)[chosen].to(q.device, torch.int64)])
        v = values[live.to(q.device)].float()
        part, part_lse = partial_attention(q[row].float() * scale, k, v)
        if merge:
            part, part_lse = merge_partials(result[row].float(), sums[row], part, part_lse)
        result[row] = part.to(result.dtype)
        sums[row] = part_lse


def box_logits(
    query: Array, high: Array, low: Array, counts: Array, scale: float, out: Array
) -> None:
    q, hi, lo, result = (to_tensor(a) for a in (query, high, low, out))
    for row, n in enumerate(counts.tolist()):
        own = q[row].float()[:, None] * scale
        result[row, :, :n] = torch.maximum(
            own * hi[row, :n].float(), own * lo[row, :n].float()
        ).sum(-1)


def dot_logits(query: Array, units: Array, counts: Array, scale: float, out: Array) -> None:
    q, u, result = (to_tensor(a) for a in (query, units, out))
    for row, n in enumerate(counts.tolist()):
        result[row, :, :n] = (q[row].float() * scale) @ u[row, :n].float().T


def combine_heads(
    logits: Array,
    counts: Array,
    sizes: Array | None,
    unit_tokens: float,
    beside: Array | None,
    aggregate: str,
    softmax: bool,
    heads: int,
    out: Array,
) -> None:
    raw, result = to_tensor(logits), to_tensor(out)
    for row, n in enumerate(counts.tolist()):
        own = raw[row, :, :n]
        size = raw.new_full((n,), unit_tokens) if sizes is None else to_tensor(sizes)[row, :n]
        live = size > 0
        if not bool(live.any()):
            result[row, :n] = -math.inf
            continue
        if softmax:
            norm = (own + size.log()).logsumexp(-1)
            if beside is not None:
                norm = torch.logaddexp(norm, to_tensor(beside)[row])
            own = own - norm[:, None]
        result[row, :n] = _over_heads(own, live, aggregate, softmax).masked_fill(~live, -math.inf)
    if aggregate == "mean_all":
        mean_over_rows(out, softmax, heads)


def _over_heads(
    own: torch.Tensor, live: torch.Tensor, aggregate: str, softmax: bool
) -> torch.Tensor:
    """Scores [u] from what each head says, [G, u]."""
    if aggregate == "per_query":
        order = own.masked_fill(~live, -math.inf).sort(descending=True, stable=True).indices
        ranks: torch.Tensor = order.argsort(-1)
        return -ranks.amin(0).float().log1p()
    if aggregate == "max":
        return own.amax(0)
    total = own.logsumexp(0) if softmax else own.sum(0)
    if aggregate == "sum":
        return total
    return total - math.log(len(own)) if softmax else total / len(own)


def mean_over_rows(scores: Array, softmax: bool, heads: int) -> None:
    """Let the `heads` rows of each sequence have their mean; log masses are averaged as masses."""
    own = to_tensor(scores).unflatten(0, (-1, heads))
    mean = own.logsumexp(1) - math.log(heads) if softmax else own.mean(1)
    own.copy_(mean[:, None].expand_as(own))


def weigh_strips(
    query: Array, strip_key: Array, strip_length: Array, scale: float, out: Array
) -> None:
    q, key, length, result = (to_tensor(a) for a in (query, strip_key, strip_length, out))
    logits = (q.float() * scale) @ key.float().transpose(1, 2)
    is_there = torch.arange(key.shape[1], device=q.device) < length.to(q.device)[:, None]
    result[...] = logits.masked_fill(~is_there[:, None], -math.inf).logsumexp(-1)


def pool_pages(
    scores: Array,
    unit_of: Array | None,
    kept: Array | None,
    blocks: Array,
    pages_per_block: int,
    softmax: bool,
    out: Array,
) -> None:
    own, result = to_tensor(scores), to_tensor(out)
    for row, n in enumerate(blocks.tolist()):
        pages = own[row, : n * pages_per_block]
        if unit_of is not None:
            of = to_tensor(unit_of)[row, : n * pages_per_block]
            pages = own[row][of.to(own.device, torch.int64)]
        pooled = pages.unflatten(0, (n, pages_per_block)) if n else pages.new_empty(0, 1)
        pooled = pooled.logsumexp(-1) if softmax else pooled.amax(-1)
        if kept is not None and n:
            top = pooled.amax().clamp(min=-3e38) + 1
            pooled = torch.where(to_tensor(kept)[row, :n].to(own.device), top, pooled)
        result[row, :n] = pooled


def select_blocks(
    scores: Array,
    counts: Array,
    costs: Array,
    unit_ptr: Array,
    unit_blocks: Array,
    budgets: Array,
    row_ptr: Array,
    ids: Array,
    out_scores: Array,
) -> int:
    at = 0
    row_ptr[0] = 0
    for row in range(counts.shape[0]):
        n, budget, table = int(counts[row]), int(budgets[row]), min(row, costs.shape[0] - 1)
        order = sorted(range(n), key=lambda unit: (-float(scores[row, unit]), unit))
        spent, cut = 0, math.inf
        for unit in order:
            if spent >= budget:
                break
            spent, cut = spent + int(costs[table, unit]), float(scores[row, unit])
        above = [unit for unit in range(n) if scores[row, unit] > cut]
        level = [unit for unit in range(n) if scores[row, unit] == cut]
        stop = at + budget
        for unit in above + level:
            start = int(unit_ptr[table, unit])
            for i in range(start, start + int(costs[table, unit])):
                if at < stop:
                    ids[at], out_scores[at] = unit_blocks[table, i], scores[row, unit]
                    at += 1
        row_ptr[row + 1] = at
    return at


def page_means(keys: Array, page_tokens: int, out: Array) -> None:
    pages = to_tensor(keys).unflatten(1, (-1, page_tokens))
    to_tensor(out).copy_(pages.mean(2, dtype=torch.float32))


def page_bounds(keys: Array, page_tokens: int, high: Array, low: Array) -> None:
    pages = to_tensor(keys).unflatten(1, (-1, page_tokens))
    to_tensor(high).copy_(pages.amax(2))
    to_tensor(low).copy_(pages.amin(2))


def nearest_centroids(points: Array, centroids: Array, offsets: Array, out: Array) -> None:
    p, c, o, labels = (to_tensor(a) for a in (points, centroids, offsets, out))
    step = max(1, _PRODUCTS // max(1, o.numel()))
    for part, own in zip(p.split(step, dim=1), labels.split(step, dim=1), strict=True):
        # argmax() took twice as long as max() on a CPU (torch 2.13, 3 x 1733 x 462, November 2026).
        own.copy_(torch.baddbmm(o[:, None], part, c.transpose(1, 2)).max(-1).indices)


def cluster_sums(points: Array, labels: Array, sums: Array, sizes: Array) -> None:
    p, own, total, count = (to_tensor(a) for a in (points, labels, sums, sizes))
    rows, clusters, dim = total.shape
    flat = (own + torch.arange(rows, device=p.device)[:, None] * clusters).flatten()
    count.copy_(torch.bincount(flat, minlength=rows * clusters).view(rows, clusters))
    total.zero_().view(-1, dim).index_add_(0, flat, p.reshape(-1, dim))


def pack_codes(codes: Array, first: int, packed: Array) -> None:
    own, words = to_tensor(codes).long(), to_tensor(packed)
    tokens = torch.arange(first, first + own.shape[1], device=words.device)
    planes = torch.arange(words.shape[3], device=words.device)
    set_bits = (own[..., None] >> planes) & 1  # [R, n, m, b]
    for lane in range(64):
        chosen = tokens % 64 == lane
        groups, flag = tokens[chosen] // 64, torch.tensor(1, device=words.device) << lane
        words[:, groups] = (words[:, groups] & ~flag) | (set_bits[:, chosen] * flag)


def lookup_tables(query: torch.Tensor, codewords: torch.Tensor, scale: float) -> torch.Tensor:
    """What each codeword adds to a logit, float32 [R, G, m, c], as `pq_logits` has its keys."""
    q = query.float().unflatten(2, (codewords.shape[1], -1))
    words = codewords[..., : q.shape[3]].float()
    return torch.einsum("rgmw,rmcw->rgmc", q, words) * scale


def pq_logits(
    query: Array, codewords: Array, codes: Array, counts: Array, scale: float, out: Array
) -> None:
    q, words, packed, result = (to_tensor(a) for a in (query, codewords, codes, out))
    bits = packed.shape[3]
    tables = lookup_tables(q, words, scale)
    lanes, planes = (torch.arange(n, device=packed.device) for n in (64, bits))
    for row, n in enumerate(counts.tolist()):
        used = packed[row, : -(-n // 64), :, None]  # [groups, m, 1, b]
        own = (((used >> lanes[:, None]) & 1) << planes).sum(-1)  # [groups, m, 64]
        chosen = own.transpose(0, 1).flatten(1)[:, :n].expand(q.shape[1], -1, -1)
        result[row, :, :n] = tables[row].gather(2, chosen).sum(1)
