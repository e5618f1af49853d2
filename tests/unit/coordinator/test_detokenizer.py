"""Text comes out whole: joined pieces equal decoding at once, for every tokenizer and cut."""

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coordinator.detokenizer import CONTEXT_TOKENS, WINDOW_TOKENS, Detokenizer, Vocabulary

Make: TypeAlias = Callable[[], Tokenizer]
TEXT = "Hello 🙂👩‍👩‍👧 世界, naïve  café — ok? \ufffd 𠮷野"


@cache
def byte_level() -> Tokenizer:
    """GPT-2's kind: every token is bytes, and a character may be spread over four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = [("H", "e"), ("l", "l"), ("Ġ", "Ġ"), ("ð", "Ł"), ("Ļ", "Ĥ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Llama 2's kind: ▁ for space, one token a byte for what the vocabulary lacks."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += sorted(set("Helowrdnaïvecafé—,?k世") | {"He", "▁o"})
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("H", "e"), ("▁", "o")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


TOKENIZERS = [byte_level, metaspace]


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    return [*(detokenizer.push(i) for i in token_ids), detokenizer.flush()]


def at_once(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_31_emoji_and_cjk_cut_at_every_token(make: Make) -> None:
    tokenizer = make()
    token_ids = tokenizer.encode(TEXT).ids
    assert at_once(tokenizer, token_ids) == TEXT
    for end in range(len(token_ids) + 1):
        cut = token_ids[:end]
        assert "".join(pieces(tokenizer, cut)) == at_once(tokenizer, cut)
    shown = pieces(tokenizer, token_ids)
    assert sum(piece.count("\ufffd") for piece in shown) == TEXT.count("\ufffd")


@pytest.mark.parametrize("make", TOKENIZERS)
def test_32_a_completion_that_begins_in_half_a_character(make: Make) -> None:
    tokenizer = make()
    token_ids = tokenizer.encode("🙂 ok").ids
    for begin in range(len(token_ids)):
        rest = token_ids[begin:]
        assert "".join(pieces(tokenizer, rest)) == at_once(tokenizer, rest)


def test_text_comes_with_the_token_that_completes_it() -> None:
    tokenizer = byte_level()
    # 🙂 is two tokens of two bytes here, é two of one.
    token_ids = tokenizer.encode("He🙂é!").ids
    assert pieces(tokenizer, token_ids) == ["He", "", "🙂", "", "é", "!", ""]


def test_text_before_a_run_of_bytes_is_not_held_back() -> None:
    tokenizer = metaspace()
    token_ids = tokenizer.encode("He🙂o").ids
    assert pieces(tokenizer, token_ids)[-7:] == ["He", "", "", "", "", "🙂o", ""]


@pytest.mark.parametrize("make", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_join_to_what_they_decode_to(make: Make, data: st.DataObject) -> None:
    tokenizer = make()
    size = tokenizer.get_vocab_size()
    runs = st.lists(
        st.one_of(
            st.text(st.sampled_from(TEXT), max_size=8).map(lambda text: tokenizer.encode(text).ids),
            st.lists(st.integers(0, size + 2), max_size=6),
        ),
        max_size=24,
    )
    token_ids = [token for run in data.draw(runs) for token in run]
    assert "".join(pieces(tokenizer, token_ids)) == at_once(tokenizer, token_ids)


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("text", ["\ufffd", "🙂", "o ", " "])
def test_the_window_stays_small(make: Make, text: str) -> None:
    tokenizer = make()
    token_ids = tokenizer.encode("He" + text * 100).ids
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    given = ""
    longest = 0
    for token_id in token_ids:
        given += detokenizer.push(token_id)
        if token_id not in Vocabulary(tokenizer).byte_ids:
            longest = max(longest, len(detokenizer._window))
    assert given + detokenizer.flush() == at_once(tokenizer, token_ids)
    assert longest <= WINDOW_TOKENS + CONTEXT_TOKENS


def test_special_tokens_and_ids_without_a_token_have_no_text() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    emoji = tokenizer.encode("🙂").ids
    token_ids = [end, emoji[0], end, 9999, *emoji[1:], end]
    assert "".join(pieces(tokenizer, token_ids)) == "🙂" == at_once(tokenizer, token_ids)
