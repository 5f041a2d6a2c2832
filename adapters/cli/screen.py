"""A run of ``tierstore generate`` as it goes: bars on standard error, answer on standard output."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierstore.adapters.cli.text import visible
from tierstore.adapters.generate import Observer

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from transformers import PreTrainedTokenizerBase, TextStreamer


def waiting(reason: str) -> AbstractContextManager[object]:
    """Show `reason` on a terminal while something takes its time."""
    console = Console(stderr=True)
    return console.status(reason) if console.is_terminal else nullcontext()


class Screen(Observer):
    """A bar for each task of a run, and the answer as it grows.

    Parameters
    ----------
    begun_answer: what the answer starts with, before the first new token.
    ends: the tokens that end the answer.
    limit: new tokens that the run makes at most.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        begun_answer: str,
        ends: Collection[int],
        limit: int,
    ) -> None:
        self._stream = _text_stream(tokenizer)
        self._unsaid, self._ends, self._left = begun_answer, ends, limit
        self._has_ended = False
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_bar()

    def start(self, task: str, total: int) -> None:
        self._stop_bar()
        console = Console(stderr=True)
        # Without a thread of its own the bar takes no time from what it shows.
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar.add_task(task, total=total)
        self._bar.start()

    def advance(self) -> None:
        assert self._bar is not None
        (task,) = self._bar.tasks
        self._bar.update(task.id, advance=1, refresh=True)
        if task.finished:
            self._stop_bar()

    def answer(self, token: int) -> None:
        self._left -= 1
        if self._has_ended:
            self.advance()
            return
        print(self._unsaid, end="")
        self._unsaid = ""
        self._stream.put(torch.tensor([token]))
        self._has_ended = token in self._ends or not self._left
        if self._has_ended:
            self._stream.end()
            self.start("measuring", self._left)

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _text_stream(tokenizer: PreTrainedTokenizerBase) -> TextStreamer:
    """Prints, for tokens that are put into it one by one, as much text as is certain."""
    from transformers import TextStreamer

    class Stream(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(visible(text), end="\n" if stream_end else "", flush=True)

    return Stream(tokenizer, skip_special_tokens=True)
