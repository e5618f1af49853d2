"""Tokenizers: the same ids as transformers, and pairs compared by content."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.errors import ConfigError, InvalidRequestError, TokenizerMismatchError
from outrider.model.tokenizers import Tokenizer, check_pair, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>' }}{% endif %}"
)


def save(
    where: Path,
    *,
    swap: tuple[int, int] | None = None,
    special: tuple[str, ...] = ("<eos>", "<s>"),
    chat_template: str | None = TEMPLATE,
    unused: int = 0,
) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swap:
        i, j = swap
        alphabet[i], alphabet[j] = alphabet[j], alphabet[i]
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    size = backend.get_vocab_size()
    backend.add_special_tokens([f"[PAD{size + i}]" for i in range(unused)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    fast.chat_template = chat_template
    fast.save_pretrained(where)
    return where


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(str(save(tmp_path / "target")))


def test_ids_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(tokenizer.name)
    text = "Grüße, 世界 🦊 <s>!"
    assert tokenizer.encode(text) == reference(text).input_ids
    messages = [{"role": "user", "content": text}]
    rendered = reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.apply_chat_template(messages) == rendered
    assert tokenizer.vocab_size == len(reference) == 258


def test_decode_leaves_special_tokens_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 🦊 b")
    assert tokenizer.decode([257, *ids, 256]) == "a 🦊 b"
    assert tokenizer.backend.token_to_id("<eos>") == 256


def test_no_chat_template_is_a_bad_request(tmp_path: Path) -> None:
    plain = load_tokenizer(str(save(tmp_path, chat_template=None)))
    assert not plain.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        plain.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_what_the_template_refuses_is_a_bad_request(tmp_path: Path) -> None:
    picky = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(str(save(tmp_path, chat_template=picky)))
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_same_content_is_a_pair(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = load_tokenizer(str(save(tmp_path / "drafter", chat_template=None)))
    check_pair(tokenizer, other)
    assert tokenizer.fingerprint == other.fingerprint


def test_padding_tokens_of_a_converter_do_not_matter(tokenizer: Tokenizer, tmp_path: Path) -> None:
    padded = load_tokenizer(str(save(tmp_path / "drafter", unused=3)))
    check_pair(tokenizer, padded)
    assert tokenizer.fingerprint == padded.fingerprint
    assert padded.vocab_size == 258


def test_embeddings_are_not_looked_at(tokenizer: Tokenizer, tmp_path: Path) -> None:
    drafter = save(tmp_path / "drafter")
    (drafter / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 99999}))
    (Path(tokenizer.name) / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 300})
    )
    check_pair(load_tokenizer(tokenizer.name), load_tokenizer(str(drafter)))


def test_same_count_but_other_content_names_the_first_id(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = load_tokenizer(str(save(tmp_path / "drafter", swap=(200, 40))))
    ours, theirs = tokenizer.tokens[40], other.tokens[40]
    with pytest.raises(TokenizerMismatchError) as caught:
        check_pair(tokenizer, other)
    message = caught.value.message
    assert f"id 40 is {ours!r} in {tokenizer.name} and {theirs!r} in {other.name}" in message
    assert tokenizer.fingerprint != other.fingerprint


def test_special_tokens_count(tokenizer: Tokenizer, tmp_path: Path) -> None:
    renamed = load_tokenizer(str(save(tmp_path / "renamed", special=("<eos>", "<t>"))))
    with pytest.raises(TokenizerMismatchError, match=r"id 257 is '<s>' .* and '<t>'"):
        check_pair(tokenizer, renamed)
    fewer = load_tokenizer(str(save(tmp_path / "fewer", special=("<eos>",))))
    with pytest.raises(TokenizerMismatchError, match=r"id 257 is '<s>' .* and no token"):
        check_pair(tokenizer, fewer)
    with pytest.raises(TokenizerMismatchError, match=r"id 257 is no token .* and '<s>'"):
        check_pair(fewer, tokenizer)
    assert len({t.fingerprint for t in (tokenizer, renamed, fewer)}) == 3


def test_missing_and_empty_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model at .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no tokenizer in"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="can't read the tokenizer"):
        load_tokenizer(str(tmp_path))
