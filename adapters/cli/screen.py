"""What ``tierstore generate`` shows: progress on standard error, all else on standard output."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import TextStreamer

from tierstore.adapters.cli.outcome import ratio
from tierstore.adapters.generate import Observer
from tierstore.sizes import format_size
...
