"""The built-in document, the user's own, and the prompts made of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

from tierstore.adapters.documents import Document, build_prompt, builtin_document, read_document
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.adapters.models import LoadedModel

PLAIN = byte_tokenizer()
CHAT = byte_tokenizer(CHAT_TEMPLATE)


def test_builtin_document_is_the_same_every_time() -> None:
    assert builtin_document(PLAIN, 5_000) == builtin_document(PLAIN, 5_000)


def test_builtin_document_fills_the_tokens_up_to_one_paragraph() -> None:
    text = builtin_document(PLAIN, 20_000).text
    assert 18_000 < len(PLAIN.encode(text)) <= 20_000


def test_builtin_document_holds_its_fact_once_as_its_own_paragraph() -> None:
    document = builtin_document(PLAIN, 20_000, city="Lima", number=12_345)
    fact = "One of the special magic numbers for Lima is: 12345."
    assert document.text.split("\n\n").count(fact) == 1
    assert document.text.count("12345") == 1
    assert f"{document.begun_answer}{document.answer}." == fact
    assert document.question == "What is the special magic number for Lima?"


def test_builtin_document_begins_with_the_instruction() -> None:
    assert builtin_document(PLAIN, 20_000).text.startswith("A special magic number is hidden")


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
def test_the_fact_stands_at_the_given_depth(depth: float) -> None:
    paragraphs = builtin_document(PLAIN, 20_000, depth=depth).text.split("\n\n")[1:]
    place = next(i for i, p in enumerate(paragraphs) if p.startswith("One of the special"))
    assert place / (len(paragraphs) - 1) == pytest.approx(depth, abs=0.02)


def test_builtin_document_is_prose() -> None:
    """Markup, code and grammar derail a small model; none of it may slip through."""
    text = builtin_document(PLAIN, 100_000).text
    assert not any(mark in text for mark in ("::=", ">>>", "****", "====", "`", "\n "))


def test_builtin_document_repeats_no_paragraph() -> None:
    """Several topics contain others."""
    paragraphs = builtin_document(PLAIN, 100_000).text.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


@pytest.mark.parametrize("tokens", [0, 20, 100_000_000])
def test_a_length_the_builtin_document_cannot_have_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"^tokens={tokens}: expected \d+ to \d+, the length"):
        builtin_document(PLAIN, tokens)


@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_a_depth_that_is_no_fraction_is_refused(depth: float) -> None:
    with pytest.raises(ConfigError, match=r"^depth=.*: expected a fraction in \[0, 1\]"):
        builtin_document(PLAIN, 5_000, depth=depth)


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffFünf Wörter.\r\n\r\nEnde\n".encode())
    assert read_document(path) == Document("Fünf Wörter.\n\nEnde\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; pass a file with text in it"),
        (b" \n\t\n", "is empty; pass a file with text in it"),
        (b"abc\xff\xfe", "byte 3 is not UTF-8; pass a UTF-8 text file"),
        (b"GGUF\x03\0\0\0", "holds zero bytes, so it is no text; pass a UTF-8 text file"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_document(path)
    assert str(raised.value) == f"document={str(path)!r}: {message}"


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory; pass a readable text file$"):
        read_document(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"Is a directory; pass a readable text file$"):
        read_document(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("secret")
    path.chmod(0)
    with pytest.raises(ConfigError, match=r"Permission denied; pass a readable text file$"):
        read_document(path)


@pytest.mark.parametrize(
    ("text", "question", "begun_answer", "prompt"),
    [
        ("A story.", "Who?", "", "<user>A story.\n\nWho?</><assistant>"),
        ("A story.", "Who?", "It was", "<user>A story.\n\nWho?</><assistant>It was"),
        ("A story.", "", "", "<user>A story.</><assistant>"),
        ("", "Who?", "", "<user>Who?</><assistant>"),
    ],
)
def test_a_prompt_follows_the_chat_template(
    text: str, question: str, begun_answer: str, prompt: str
) -> None:
    assert CHAT.decode(build_prompt(CHAT, text, question, begun_answer)) == prompt


@pytest.mark.parametrize(
    ("text", "question", "begun_answer", "prompt"),
    [
        ("A story.", "Who?", "", "A story.\n\nQuestion: Who?\nAnswer:"),
        ("A story.", "Who?", "It was", "A story.\n\nQuestion: Who?\nAnswer: It was"),
        ("A story.", "", "", "A story."),
        ("", "Who?", "", "Question: Who?\nAnswer:"),
    ],
)
def test_a_prompt_without_a_chat_template_is_plain(
    text: str, question: str, begun_answer: str, prompt: str
) -> None:
    assert PLAIN.decode(build_prompt(PLAIN, text, question, begun_answer)) == prompt


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT], ids=["plain", "chat"])
def test_a_prompt_of_nothing_is_refused(tokenizer: object) -> None:
    with pytest.raises(ConfigError, match=r"both empty; pass at least a question$"):
        build_prompt(tokenizer, "", "")  # type: ignore[arg-type]


def test_the_demo_model_finds_the_fact(demo_model: LoadedModel) -> None:
    """With its own attention, in a short version: the form of the prompt is one it understands."""
    tokenizer = demo_model.tokenizer
    document = builtin_document(tokenizer, 500, city="Nairobi", number=13_908)
    prompt = build_prompt(tokenizer, document.text, document.question)
    ids = torch.tensor([prompt])
    generated = demo_model.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20
    )
    assert document.answer in tokenizer.decode(generated[0, len(prompt) :])
