"""Whether a disk still works."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tierstore.events import emit

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

OFFLINE_AFTER = 8
"""Failed calls in a row after which a disk is left alone."""

_OF_THE_MOMENT = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Health:
    """Counts failed calls of one disk, called `name`; a good one in between starts again at none.

    A full disk, or too few descriptors, do not speak against the disk.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.errors: Counter[str] = Counter()
        """Failed calls by the name of their error."""
        self._in_a_row = 0

    @property
    def is_offline(self) -> bool:
        """Whether the disk is left alone until the store opens again."""
        return self._in_a_row >= OFFLINE_AFTER

    def call(
        self,
        call: Callable[_Arguments, _Result],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        """Call the disk; an OSError is noted and passes through."""
        try:
            result = call(*arguments, **named)
        except OSError as error:
            self.note(error)
            raise
        self.praise()
        return result

    def note(self, error: OSError) -> None:
        """Count a failed call."""
        self.errors[errno.errorcode.get(error.errno or 0, type(error).__name__)] += 1
        if error.errno not in _OF_THE_MOMENT:
            self._in_a_row += 1
            if self._in_a_row == OFFLINE_AFTER:
                self._say_offline()

    def praise(self) -> None:
        """Note that a call went well; what is offline stays so."""
        if not self.is_offline:
            self._in_a_row = 0

    def give_up(self) -> None:
        """Go offline now."""
        if not self.is_offline:
            self._in_a_row = OFFLINE_AFTER
            self._say_offline()

    def _say_offline(self) -> None:
        emit(
            _log, logging.ERROR, "tier.offline",
            f"{self._name}: offline after failed calls {dict(self.errors)}",
            path=self._name, errors=dict(self.errors),
        )  # fmt: skip
