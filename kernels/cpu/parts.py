"""Pieces that kernels are put together from, with names by which Numba knows them again.

Numba keeps a compiled kernel on disk under what its closure holds, pickled. A piece would be
pickled under a name that is another one in each process, so that each compiled all kernels anew:
three seconds for attention. Here a piece stands for what it was made of.
"""

import hashlib
from functools import cache
from pathlib import Path

from numba import njit
from numba.core.registry import CPUDispatcher

from tierstore.kernels.cpu.scalar import FAST


class Part(CPUDispatcher):
    """A compiled function that pickles as its name, to be hashed and not to be read again."""

    def _reduce_states(self):
        return {"name": _name_of(self.py_func)}

    @classmethod
    def _rebuild(cls, name):
        raise TypeError(f"{name}: a part of a kernel cannot be unpickled")


def part(function):
    """Written into the kernels that call it: called as functions, parts took twice the time."""
    return known(njit(inline="always", fastmath=FAST)(function))


def known(dispatcher):
    """A compiled function that kernels may have in their closures."""
    dispatcher.__class__ = Part
    return dispatcher


def _name_of(function):
    """What a function does, as a text: its code, what it closes over, and the code around it."""
    code = function.__code__
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    names = [_name_of(each.py_func) if isinstance(each, Part) else repr(each) for each in closed]
    return f"{function.__module__}.{function.__qualname__}({', '.join(names)}) " + _digest(
        code.co_code + repr(code.co_consts).encode() + _sources()
    )


def _digest(content):
    return hashlib.sha256(content).hexdigest()


@cache
def _sources():
    """Of all files here: what is called by its global name is in no closure."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return _digest(b"".join(file.read_bytes() for file in files)).encode()
