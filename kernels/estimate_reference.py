"""The specification of `tierstore.kernels.estimate` in plain torch."""

import math

import torch

from tierstore.kernels.element import Array, to_tensor
from tierstore.kernels.reference import merge_partials, partial_attention
from tierstore.kernels.shape import BlockShape

_FLOOR = 1e-4


def inclusion_probability(cosine: torch.Tensor, bits: int, tables: int) -> torch.Tensor:
    """That a key at this cosine from a query meets it in 2 or more of the tables."""
    hit = (1 - torch.acos(cosine.double().clamp(-1, 1)) / math.pi) ** bits
    missed = (1 - hit) ** (tables - 1)
    return 1 - missed * (1 - hit) - tables * hit * missed


def attend_clusters(
    query: Array,
    centroids: Array,
    values: Array,
    sizes: Array,
    row_ptr: Array,
    units: Array,
    scale: float,
    out: Array,
    lse: Array,
    *,
    merge: bool,
) -> None:
    q, c, v, weights = (to_tensor(a) for a in (query, centroids, values, sizes))
    for row in range(len(q)):
        own = to_tensor(units)[int(row_ptr[row]) : int(row_ptr[row + 1])].to(q.device, torch.int64)
        own = own[weights[row, own] > 0]
        logits = q[row].float() * scale @ c[row, own].float().T + weights[row, own].log()
        _put(logits, v[row, own].float()[None], row, out, lse, merge)


def attend_sampled(
    query: Array,
    pool: Array,
    shape: BlockShape,
    row_ptr: Array,
    slots: Array,
    valid: Array,
    blocks: Array,
    collisions: Array,
    centre: Array,
    bits: int,
    tables: int,
    scale: float,
    out: Array,
    lse: Array,
    *,
    merge: bool,
) -> None:
    q, met = to_tensor(query), to_tensor(collisions)
    places = torch.arange(shape.tokens, device=q.device)
    for row in range(len(q)):
        own = slice(int(row_ptr[row]), int(row_ptr[row + 1]))
        at, number, used = (to_tensor(a)[own].to(q.device).long() for a in (slots, blocks, valid))
        keys, values = shape.keys_and_values(to_tensor(pool)[at])
        live = (places < used[:, None]).reshape(-1)
        tokens = (number[:, None] * shape.tokens + places).reshape(-1)[live]
        key = keys.reshape(-1, shape.key_dim)[live].float()
        value = values.reshape(-1, shape.value_dim)[live].float()
        asked, hashed = q[row].float(), key - to_tensor(centre)[row]
        norms = asked.norm(dim=-1)[:, None] * hashed.norm(dim=-1)
        w = inclusion_probability(asked @ hashed.T / norms.clamp(min=1e-30), bits, tables)
        logits = asked * scale @ key.T - (w + _FLOOR).log().float()
        logits = logits.masked_fill(met[row][:, tokens] < 2, -math.inf)
        _put(logits, value[None], row, out, lse, merge)


def _put(
    logits: torch.Tensor, values: torch.Tensor, row: int, out: Array, lse: Array, merge: bool
) -> None:
    """Softmax of logits [G, n] over values [1, n, e] into one row."""
    result, sums = to_tensor(out), to_tensor(lse)
    part, part_lse = partial_attention(
        logits.new_ones(len(logits), 1, 1), logits[..., None], values
    )
    part, part_lse = part[:, 0], part_lse[:, 0]
    if merge:
        part, part_lse = merge_partials(result[row], sums[row], part, part_lse)
    result[row], sums[row] = part, part_lse


def pack_signs(projections: Array, bits: int, out: Array) -> None:
    positive = to_tensor(projections).unflatten(-1, (-1, bits)) > 0
    powers = 2 ** torch.arange(bits, device=positive.device)
    to_tensor(out).view(torch.int16).copy_((positive * powers).sum(-1))


def count_collisions(asked: Array, codes: Array, counts: Array, out: Array) -> None:
    result = to_tensor(out)
    # 16 bits as an element are half precision; here they are bits.
    met, own = (to_tensor(a).view(torch.int16) for a in (asked, codes))
    for row, n in enumerate(counts.tolist()):
        same = met[row][:, None] == own[row, :n]
        result[row, :, :n] = same.sum(-1).float()


def walk_graph(query: Array, vectors: Array, n: int, near: Array, logits: Array) -> None:
    q, v, found, values = (to_tensor(a) for a in (query, vectors, near, logits))
    products = q.float() @ v[:, :n].float().transpose(1, 2)
    best = products.topk(min(n, found.shape[2]), dim=-1)
    found.fill_(-1)[..., :n] = best.indices
    values.fill_(-math.inf)[..., :n] = best.values
