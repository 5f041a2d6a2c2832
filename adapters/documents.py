"""Long documents to ask questions about, and the prompts that ask them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedTokenizerBase

# The wording of RULER's needle task (https://arxiv.org/abs/2404.06654).
_INSTRUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards."
)
_BREAK = "\n\n"
# Code, grammar, tables and headings; prose starts at the left margin.
_NOT_PROSE = re.compile(r"\A |^\.\. |::=|>>>|\*\*\*\*|====|~~~~|----", re.MULTILINE)
_CHARACTERS_PER_TOKEN = 8  # more than real text has
_SHORTEST_PARAGRAPH = 80  # characters; shorter ones are mostly labels


@dataclass(frozen=True, slots=True)
class Document:
    """A text and, where something is known about it, a question with its answer.

    A prompt may end with `begun_answer`; then a model goes on with `answer`.
    """

    text: str
    question: str = ""
    begun_answer: str = ""
    answer: str = ""


def builtin_document(
    tokenizer: PreTrainedTokenizerBase,
    tokens: int = 6_000,
    *,
    city: str = "Oslo",
    number: int = 58_241,
    depth: float = 0.5,
) -> Document:
    """English prose about Python in which a magic number for `city` is planted.

    The prose is that of `pydoc_data.topics`: the same for everyone with the same Python version.

    Parameters
    ----------
    tokenizer
        Counts the tokens.
    tokens
        Longest text: as many whole paragraphs are kept as fit.
    depth
        Where the fact stands: 0 is the beginning of the text, 1 its end.

    Raises
    ------
    ConfigError
        The prose has fewer than `tokens`, the fact alone has more, or `depth` is no fraction.
    """
    if not 0 <= depth <= 1:
        raise ConfigError(f"depth={depth}: expected a fraction in [0, 1]; pass for example 0.5")
    # With its space: digits are tokens of their own, and a model may put a new line there instead.
    begun_answer = f"One of the special magic numbers for {city} is: "
    fact = f"{begun_answer}{number}."
    prose = builtin_prose()
    fixed = sum(_lengths(tokenizer, (_INSTRUCTION, fact)))
    ends = list(accumulate(_lengths(tokenizer, prose), initial=fixed))
    if not fixed <= tokens <= ends[-1]:
        raise ConfigError(
            f"tokens={tokens}: expected {fixed} to {ends[-1]}, the length of the built-in document"
        )
    kept = sum(end <= tokens for end in ends) - 1
    place = round(depth * kept)
    text = [_INSTRUCTION, *prose[:place], fact, *prose[place:kept]]
    question = f"What is the special magic number for {city}?"
    return Document(_BREAK.join(text), question, begun_answer, str(number))


def read_document(path: str | os.PathLike[str]) -> Document:
    """The text of a UTF-8 file.

    Raises
    ------
    ConfigError
        The file cannot be read, is not UTF-8 text, or has nothing but white space in it.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"document={str(path)!r}: {error.strerror}; pass a readable text file"
        ) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"document={str(path)!r}: byte {error.start} is not UTF-8; pass a UTF-8 text file"
        ) from error
    if "\0" in text:
        raise ConfigError(
            f"document={str(path)!r}: holds zero bytes, so it is no text; pass a UTF-8 text file"
        )
    if not text.strip():
        raise ConfigError(f"document={str(path)!r}: is empty; pass a file with text in it")
    return Document(text.replace("\r\n", "\n"))


def beginning(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text, without special ones. ConfigError if it has fewer."""
    part = text[: _CHARACTERS_PER_TOKEN * tokens]
    ids: list[int] = tokenizer.encode(part, add_special_tokens=False, verbose=False)[:tokens]
    if len(ids) < tokens:
        raise ConfigError(
            f"the document has {len(ids):,} tokens, and {tokens:,} are needed with those to "
            "decode; ask for fewer or give a longer one"
        )
    return ids


def build_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, question: str, begun_answer: str = ""
) -> list[int]:
    """Token ids of a prompt that shows `text`, asks `question` and waits for the answer.

    Models with a chat template get both in one message of the user. `text` or `question` may be
    empty. With `begun_answer` the prompt ends inside the answer, right behind these words.

    Raises
    ------
    ConfigError
        `text` and `question` are both empty.
    """
    if not (text or question):
        raise ConfigError("prompt: document and question are both empty; pass at least a question")
    has_template = tokenizer.chat_template is not None
    prompt = _chat(tokenizer, text, question) if has_template else _plain(text, question)
    if begun_answer:
        prompt += begun_answer if has_template else f" {begun_answer}"
    # A template has written the special tokens already.
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=not has_template)
    return ids


def _chat(tokenizer: PreTrainedTokenizerBase, text: str, question: str) -> str:
    messages = [{"role": "user", "content": _join(text, question)}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _plain(text: str, question: str) -> str:
    return _join(text, f"Question: {question}\nAnswer:" if question else "")


def _join(*texts: str) -> str:
    return _BREAK.join(text for text in texts if text)


def _lengths(tokenizer: PreTrainedTokenizerBase, paragraphs: tuple[str, ...]) -> list[int]:
    """Tokens of each paragraph with the break before it."""
    return [len(tokenizer.encode(_BREAK + p, add_special_tokens=False)) for p in paragraphs]


@cache
def builtin_prose() -> tuple[str, ...]:
    """Paragraphs of whole sentences of `pydoc_data.topics`, each once: topics quote one another."""
    from pydoc_data.topics import topics

    blocks = (block for topic in topics.values() for block in re.split(r"\n\s*\n", topic))
    paragraphs = (_unwrap(block) for block in blocks if not _NOT_PROSE.search(block))
    return tuple(
        dict.fromkeys(
            paragraph
            for paragraph in paragraphs
            if len(paragraph) >= _SHORTEST_PARAGRAPH and paragraph.endswith(".")
        )
    )


def _unwrap(block: str) -> str:
    """`block` on one line, without the marks for emphasis, code and list items."""
    rejoined = re.sub(r"(?<=\w)-\n\s*", "-", block)
    return " ".join(re.sub(r"[*`\"]", "", rejoined).split())
