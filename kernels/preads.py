"""Many reads of files in one call that runs without the GIL.

Threads that read through Python take the GIL back after every read; where many do, that costs more
than the reads.
"""

from tierstore.kernels.jit import njit

try:
    from numba import types

    _pread = types.ExternalFunction(
        "pread", types.intp(types.intc, types.uintp, types.uintp, types.int64)
    )
except ImportError:
    _pread = None

IS_COMPILED = _pread is not None


@njit
def read_many(files, addresses, sizes, offsets, counts):
    """Fill each buffer, as far as calls without an error do; `counts` receives the bytes read."""
    for i in range(files.shape[0]):
        counts[i] = 0
        while counts[i] < sizes[i]:
            rest = sizes[i] - counts[i]
            count = _pread(files[i], addresses[i] + counts[i], rest, offsets[i] + counts[i])
            if count <= 0:
                break
            counts[i] += count
