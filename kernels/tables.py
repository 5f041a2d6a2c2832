"""The directory's inner loops: handles, judging, residency lists, and copying blocks between slots.

`CHUNK` handles are given to a segment at a time: block b of segment s has the handle
``chunks[s, b // CHUNK] * CHUNK + b % CHUNK`` for as long as the segment lives.
"""

import numpy as np

from tierstore.kernels.jit import njit

CHUNK = 64


@njit
def first_bad_id(segments, row_ptr, ids, blocks_of):
    """Position of the first id that is no block of its row, or -1; -2 for bad row pointers."""
    rows = segments.shape[0]
    if row_ptr.shape[0] != rows + 1 or row_ptr[0] != 0 or row_ptr[rows] != ids.shape[0]:
        return -2
    for row in range(rows):
        if row_ptr[row + 1] < row_ptr[row]:
            return -2
    for row in range(rows):
        for i in range(row_ptr[row], row_ptr[row + 1]):
            if ids[i] < 0 or ids[i] >= blocks_of[segments[row]]:
                return i
    return -1


@njit
def judge(chunks, blocks_of, segments, row_ptr, blocks, slot_of, valid_of, last_used, step,
          handles, slots, valid):  # fmt: skip
    """Handles, slots (-1 = miss) and valid counts of a selection; returns the number of misses.

    Returns -1 - i if block i is unknown or selected twice, -1 - n if the row pointers do not cover
    the n blocks. Every selected handle is stamped with `step`, which protects it from eviction
    during that step.
    """
    bad = first_bad_id(segments, row_ptr, blocks, blocks_of)
    if bad != -1:
        return -1 - (bad if bad >= 0 else blocks.shape[0])
    misses = 0
    for row in range(segments.shape[0]):
        segment = segments[row]
        for i in range(row_ptr[row], row_ptr[row + 1]):
            block = blocks[i]
            handle = chunks[segment, block // CHUNK] * CHUNK + block % CHUNK
            if last_used[handle] == step:
                return -1 - i
            slot = slot_of[handle]
            handles[i] = handle
            slots[i] = slot
            valid[i] = valid_of[handle]
            last_used[handle] = step
            if slot < 0:
                misses += 1
    return misses


@njit
def worth_fetching(row_ptr, scores, slots, held, delta, kept_ptr, kept):
    """Positions of the selected blocks of each row that are there or worth fetching.

    A missing block is worth it if its score is at least `delta` above the lowest one selected in
    its row. A row that has fewer blocks in its domain (`held`) than it selects keeps all.
    """
    at = 0
    kept_ptr[0] = 0
    for row in range(row_ptr.shape[0] - 1):
        first = row_ptr[row]
        last = row_ptr[row + 1]
        is_cold = held[row] < last - first
        lowest = np.inf
        for i in range(first, last):
            lowest = min(lowest, scores[i])
        for i in range(first, last):
            if is_cold or slots[i] >= 0 or scores[i] - lowest >= delta:
                kept[at] = i
                at += 1
        kept_ptr[row + 1] = at
    return at


@njit
def install(handles, slots, domains, slot_of, handle_of, members, counts, position):
    """Enter blocks into slots and into their domains' member lists."""
    for i in range(handles.shape[0]):
        handle = handles[i]
        domain = domains[i]
        slot_of[handle] = slots[i]
        handle_of[slots[i]] = handle
        position[handle] = counts[domain]
        members[domain, counts[domain]] = handle
        counts[domain] += 1


@njit
def remove(handles, domains, slot_of, handle_of, members, counts, position, freed):
    """Take blocks out of their slots and lists; `freed` receives the slots."""
    for i in range(handles.shape[0]):
        handle = handles[i]
        domain = domains[i]
        slot = slot_of[handle]
        freed[i] = slot
        slot_of[handle] = -1
        handle_of[slot] = -1
        counts[domain] -= 1
        last = members[domain, counts[domain]]
        members[domain, position[handle]] = last
        position[last] = position[handle]
        position[handle] = -1


@njit
def collect(domains, members, counts, row_ptr, out):
    """The member handles of each of `domains`, concatenated."""
    at = 0
    row_ptr[0] = 0
    for i in range(domains.shape[0]):
        for j in range(counts[domains[i]]):
            out[at] = members[domains[i], j]
            at += 1
        row_ptr[i + 1] = at
    return at


@njit
def lowest(rank, tie, row_ptr, need, order, picks):
    """Per row, the positions of the `need` entries of lowest (rank, tie, position).

    Requires: no row needs more entries than it has.
    """
    at = 0
    for row in range(need.shape[0]):
        n = row_ptr[row + 1] - row_ptr[row]
        want = need[row]
        if 0 < want < n:
            sure, n = _narrow(rank, row_ptr[row], n, want, order)
            if sure < want:
                _partition(rank, tie, order[sure:], n - sure, want - sure)
        else:
            for i in range(n):
                order[i] = row_ptr[row] + i
        for i in range(want):
            picks[at] = order[i]
            at += 1


_BINS = 128


@njit
def _narrow(rank, first, n, want, order):
    """Fill `order` with the entries of one row that must be picked, then those that may be.

    Returns the number of the former, and of both. Counting into bins has none of the branches that
    a sort mispredicts; the few entries of the bin that the cut falls in are left to be sorted.
    """
    low = rank[first]
    high = low
    are_numbers = True
    for i in range(first, first + n):
        low = min(low, rank[i])
        high = max(high, rank[i])
        are_numbers &= rank[i] - rank[i] == 0
    width = float(high) - float(low)
    if not (are_numbers and 1e-30 < width < 1e30):
        for i in range(n):
            order[i] = first + i
        return 0, n
    factor = (_BINS - 1) / width
    counts = np.zeros(_BINS + 1, np.int32)
    for i in range(first, first + n):
        counts[int((float(rank[i]) - float(low)) * factor)] += 1
    cut = 0
    below = 0
    while below + counts[cut] < want:
        below += counts[cut]
        cut += 1
    sure = 0
    maybe = below
    for i in range(first, first + n):
        bin = int((float(rank[i]) - float(low)) * factor)
        if bin < cut:
            order[sure] = i
            sure += 1
        elif bin == cut:
            order[maybe] = i
            maybe += 1
    return sure, maybe


@njit
def _before(rank, tie, a, b):
    if rank[a] != rank[b]:
        return rank[a] < rank[b]
    if tie[a] != tie[b]:
        return tie[a] < tie[b]
    return a < b


@njit
def _partition(rank, tie, order, n, want):
    """Quickselect: the `want` first of `order` under the total order, in no particular order."""
    low = 0
    high = n - 1
    while low < high:
        pivot = order[(low + high) // 2]
        i = low
        j = high
        while i <= j:
            while _before(rank, tie, order[i], pivot):
                i += 1
            while _before(rank, tie, pivot, order[j]):
                j -= 1
            if i <= j:
                order[i], order[j] = order[j], order[i]
                i += 1
                j -= 1
        if want - 1 <= j:
            high = j
        elif want - 1 >= i:
            low = i
        else:
            return


@njit
def gather_scores(handles, owner_segment, owner_index, row_of, unit_of, unit_scores, out):
    """The current score of each handle: its unit's score in its segment's row; -inf if unknown."""
    for i in range(handles.shape[0]):
        chunk = handles[i] // CHUNK
        row = row_of[owner_segment[chunk]]
        out[i] = -np.inf
        if row >= 0:
            block = owner_index[chunk] * CHUNK + handles[i] % CHUNK
            if block < unit_of.shape[1]:
                unit = unit_of[min(row, unit_of.shape[0] - 1), block]
                if unit >= 0:
                    out[i] = unit_scores[row, unit]


@njit
def copy_rows(source, source_rows, target, target_rows, start, stop):
    """target[target_rows[i], start:stop] = source[source_rows[i], start:stop]."""
    for i in range(source_rows.shape[0]):
        s = source[source_rows[i]][start:stop]
        t = target[target_rows[i]][start:stop]
        # From 0 on: no index may be negative, so that this is vector code.
        for j in range(t.shape[0]):
            t[j] = s[j]


@njit
def copy_pieces(source, at, target, target_rows, start, stop):
    """target[target_rows[i], start:stop] = source[at[i] + start : at[i] + stop]; source is flat."""
    for i in range(at.shape[0]):
        s = source[at[i] + start : at[i] + stop]
        t = target[target_rows[i]][start:stop]
        for j in range(t.shape[0]):
            t[j] = s[j]


@njit
def eligible(residents, row_ptr, leases, last_used, since, out, able):
    """Which residents may leave (not leased, not used since that step), and how many of a row."""
    for row in range(able.shape[0]):
        able[row] = 0
        for i in range(row_ptr[row], row_ptr[row + 1]):
            out[i] = leases[residents[i]] == 0 and last_used[residents[i]] < since
            able[row] += out[i]


@njit
def copies(residents, row_ptr, slot_above, leases, last_used, since, keep, most, out):
    """Residents that are above too, used since that step and not leased, at most so many of a row.

    keep: handles, rising, of those that stay. Returns how many; `most` is then what is left of it.
    """
    found = 0
    for row in range(most.shape[0]):
        for i in range(row_ptr[row], row_ptr[row + 1]):
            handle = residents[i]
            if most[row] == 0:
                break
            if slot_above[handle] < 0 or leases[handle] != 0 or last_used[handle] < since:
                continue
            at = np.searchsorted(keep, handle)
            if at == keep.shape[0] or keep[at] != handle:
                out[found] = handle
                found += 1
                most[row] -= 1
    return found


@njit
def first_bad_victim(
    victims, expected_domains, domain_of, owner_segment, slot_of, leases, last_used, since
):
    """Position of the first victim that may not leave, or -1; stamps them, so a repeat is bad."""
    for i in range(victims.shape[0]):
        handle = victims[i]
        if handle < 0 or handle >= slot_of.shape[0] or slot_of[handle] < 0:
            return i
        if domain_of[owner_segment[handle // CHUNK]] != expected_domains[i]:
            return i
        if leases[handle] != 0 or last_used[handle] >= since:
            return i
        last_used[handle] = since
    return -1


@njit
def append_tokens(strip_key, strip_value, lengths, keep, key, value):
    """Put one token at the end of each row's strip; `keep` has one flag per sequence."""
    heads = strip_key.shape[0] // keep.shape[0]
    for row in range(strip_key.shape[0]):
        if keep[row // heads]:
            at = lengths[row]
            for j in range(key.shape[1]):
                strip_key[row, at, j] = key[row, j]
            for j in range(value.shape[1]):
                strip_value[row, at, j] = value[row, j]
            lengths[row] = at + 1


@njit
def room_needed(domains, counts, quota, need):
    """Blocks that must leave each domain before one more block per entry of `domains` fits."""
    total = 0
    for i in range(domains.shape[0]):
        need[domains[i]] += 1
    for domain in range(need.shape[0]):
        if need[domain] > 0:
            need[domain] = max(0, counts[domain] + need[domain] - quota[domain])
            total += need[domain]
    return total


@njit
def fitting(domains, counts, quota, free, taken, out):
    """Positions, in order, of the entries that their domains and the `free` slots have room for."""
    at = 0
    for i in range(domains.shape[0]):
        domain = domains[i]
        if at < free and counts[domain] + taken[domain] < quota[domain]:
            taken[domain] += 1
            out[at] = i
            at += 1
    return at


@njit
def residents(domains, members, counts, slot_of, valid_of, row_ptr, handles, slots, valid):
    """Members of each domain with their slots and valid counts, concatenated."""
    at = 0
    row_ptr[0] = 0
    for i in range(domains.shape[0]):
        for j in range(counts[domains[i]]):
            handle = members[domains[i], j]
            handles[at] = handle
            slots[at] = slot_of[handle]
            valid[at] = valid_of[handle]
            at += 1
        row_ptr[i + 1] = at
