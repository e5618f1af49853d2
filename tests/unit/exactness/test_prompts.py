"""Prompts of the verifier, from a file or its own."""

from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.exactness.prompts import TEXTS, encode, encode_plain, read_texts
from outrider.model.tokenizers import load_tokenizer
from tests.support.models import save_tokenizer


def test_own_texts() -> None:
    assert read_texts(None, 2) == list(TEXTS[:2])
    assert len(read_texts(None, 1000)) == len(TEXTS) >= 8


def test_a_line_is_a_text_or_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('plain\n\n{"prompt": "one"}\n{"category": "x", "turns": ["two", "three"]}\n')
    assert read_texts(str(file), 10) == ["plain", "one", "two"]
    assert read_texts(str(file), 2) == ["plain", "one"]


@pytest.mark.parametrize("line", ['{"prompt"', '{"text": "x"}', '{"turns": []}', '{"turns": 3}'])
def test_bad_json_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(f"good\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_texts(str(file), 10)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the prompts"):
        read_texts(str(tmp_path / "nowhere"), 1)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no prompt in"):
        read_texts(str(tmp_path / "empty"), 1)


def test_prompts_are_chat_messages_where_there_is_a_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert encode(tokenizer, "hi") == tuple(tokenizer.encode("user: hi\nassistant: "))
    assert encode_plain(tokenizer, "hi") == tuple(tokenizer.encode("hi"))
    # A tokenizer may know nothing of a text.
    assert encode_plain(tokenizer, "") == (0, 1, 2, 3)
