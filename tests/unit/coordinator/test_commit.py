"""The commit step, against the cases of other engines' users (numbers as in their list)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.commit import CommitStep, Limits, Piece
from coordinator.detokenizer import Detokenizer, Vocabulary
from outrider.figures import SpeculationFigures
from outrider.messages import FinishReason, TokenLogprobs, TokenOrigin

ACCEPTED, RECOVERED = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED
BONUS, PLAIN = TokenOrigin.BONUS, TokenOrigin.PLAIN
EOS = 256


def make_tokenizer() -> Tokenizer:
    """One token a byte, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.add_special_tokens(["<eos>"]) == 1
    assert tokenizer.token_to_id("<eos>") == EOS
    return tokenizer


TOKENIZER = make_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def step(
    *,
    stop: tuple[str, ...] = (),
    stop_ids: frozenset[int] = frozenset({EOS}),
    max_tokens: int = 1000,
    prompt_len: int = 4,
    context_len: int = 1000,
    include_stop: bool = False,
) -> CommitStep:
    limits = Limits(prompt_len, max_tokens, context_len)
    detokenizer = Detokenizer(Vocabulary(TOKENIZER))
    return CommitStep(
        detokenizer, limits=limits, stop_ids=stop_ids, stop=stop, include_stop=include_stop
    )


def rounds(step: CommitStep, token_ids: list[int], k: int) -> tuple[str, list[int]]:
    """Commit in rounds of k accepted tokens and a bonus; the text and ids as a client sees them."""
    text, shown = "", []
    for begin in range(0, len(token_ids), k + 1):
        part = token_ids[begin : begin + k + 1]
        origins = [ACCEPTED] * k + [BONUS]
        for piece in step.commit(part, origins[: len(part)], k):
            text += piece.text
            shown.append(piece.token_id)
    if step.finish_reason is None:
        step.end(FinishReason.CANCELLED)
    return text + step.flush(), shown


@pytest.mark.parametrize("eos", [EOS, ids("d")[0]])
@pytest.mark.parametrize("k", [0, 1, 4, 9])
def test_13_ends_at_the_first_eos_in_text_ids_usage_and_figures(eos: int, k: int) -> None:
    commit = step(stop_ids=frozenset({eos}))
    token_ids = [*ids("abc"), eos, *ids("xyzd"), eos]
    assert rounds(commit, token_ids, k) == ("abc", [*ids("abc"), eos])
    assert commit.token_ids == [*ids("abc"), eos]
    assert commit.finish_reason is FinishReason.STOP
    kept = 4
    assert commit.figures.accepted_tokens == kept - kept // (k + 1)
    assert commit.figures.acceptance_rate == (1.0 if k else 0.0)
    assert commit.figures.rounds == -(-kept // (k + 1))


@pytest.mark.parametrize("k", range(7))
def test_14_stop_string_over_two_rounds_and_inside_an_accepted_block(k: int) -> None:
    commit = step(stop=("STOP", "never"))
    text, shown = rounds(commit, ids("one STOpSTOP two STOP"), k)
    assert text == "one STOp"
    assert shown == commit.token_ids == ids("one STOpSTOP")
    assert commit.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("k", range(7))
def test_14_the_stop_string_stays_if_it_is_wanted_and_nothing_after_it(k: int) -> None:
    commit = step(stop=("STOP", "never"), include_stop=True)
    text, shown = rounds(commit, ids("one STOpSTOP two STOP"), k)
    assert text == "one STOpSTOP"
    assert shown == commit.token_ids == ids("one STOpSTOP")


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    """Different for each place and token."""
    return [TokenLogprobs(-0.5 - at, ((token, -0.25),)) for at, token in enumerate(token_ids)]


@pytest.mark.parametrize(
    ("ending", "kept"),
    [
        ({"stop_ids": frozenset(ids("d"))}, 4),
        ({"stop": ("cd",)}, 4),
        ({"stop": ("cd",), "include_stop": True}, 4),
        ({"max_tokens": 3}, 3),
        ({"prompt_len": 4, "context_len": 9}, 5),
    ],
)
@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_13_14_21_logprobs_are_cut_with_the_tokens_they_belong_to(
    ending: dict[str, Any], kept: int, k: int
) -> None:
    commit = step(**ending)
    token_ids = ids("abcdefgh")
    wanted = logprobs_of(token_ids)
    pieces: list[Piece] = []
    for begin in range(0, len(token_ids), k + 1):
        part = slice(begin, begin + k + 1)
        origins = [ACCEPTED] * (len(token_ids[part]) - 1) + [BONUS]
        pieces += commit.commit(token_ids[part], origins, k, wanted[part])
    assert [piece.token_id for piece in pieces] == commit.token_ids == token_ids[:kept]
    assert [piece.logprobs for piece in pieces] == wanted[:kept]


def test_21_without_a_wish_there_are_no_logprobs() -> None:
    assert [piece.logprobs for piece in step().commit(ids("ab"), [PLAIN] * 2)] == [None, None]
    with pytest.raises(ValueError, match="shorter"):
        step().commit(ids("ab"), [PLAIN] * 2, 0, logprobs_of(ids("a")))


def test_14_text_that_may_become_a_stop_string_is_not_shown() -> None:
    commit = step(stop=("STOP",))
    pieces = commit.commit(ids("a STx"), [PLAIN] * 5)
    assert [piece.text for piece in pieces] == ["a", " ", "", "", "STx"]
    commit.commit(ids("ST"), [PLAIN] * 2)
    commit.end(FinishReason.LENGTH)
    assert commit.flush() == "ST"


@pytest.mark.parametrize("k", [1, 4])
def test_15_the_token_cap_is_met_exactly(k: int) -> None:
    for max_tokens in range(1, 2 * k + 2):
        commit = step(max_tokens=max_tokens)
        text, shown = rounds(commit, ids("a" * 30), k)
        assert text == "a" * max_tokens
        assert len(shown) == len(commit.token_ids) == max_tokens
        assert commit.finish_reason is FinishReason.LENGTH


def test_16_the_last_place_of_the_context_is_used() -> None:
    commit = step(prompt_len=60, context_len=64)
    text, _ = rounds(commit, ids("abcdefghij"), 5)
    assert text == "abcd"
    assert commit.finish_reason is FinishReason.LENGTH
    assert commit.figures == SpeculationFigures(1, 1, 4, 4, [1, 1, 1, 1])


@pytest.mark.parametrize("k", range(6))
def test_31_emoji_and_cjk_over_every_block_boundary(k: int) -> None:
    text = "🙂 世界 👩‍👧 ok"
    for offset in range(k + 1):
        commit = step()
        first = commit.commit(ids(text)[:offset], [PLAIN] * offset)
        rest, _ = rounds(commit, ids(text)[offset:], k)
        assert "".join(piece.text for piece in first) + rest == text


def test_32_half_a_character_of_the_prompt_is_not_shown() -> None:
    token_ids = ids("🙂ok")
    commit = step()
    text, _ = rounds(commit, token_ids[2:], 2)
    assert "🙂" not in text
    assert text == TOKENIZER.decode(token_ids[2:])


def test_half_a_character_at_the_end_is_flushed() -> None:
    commit = step(max_tokens=3)
    assert rounds(commit, ids("a🙂"), 3) == ("a\ufffd", ids("a🙂")[:3])


@pytest.mark.parametrize(
    ("origins", "draft_tokens", "figures"),
    [
        ([PLAIN], 0, SpeculationFigures(1, 0, 0, 0, [])),
        ([RECOVERED], 3, SpeculationFigures(1, 1, 3, 0, [])),
        ([ACCEPTED, RECOVERED], 3, SpeculationFigures(1, 1, 3, 1, [1])),
        ([ACCEPTED, ACCEPTED, BONUS], 2, SpeculationFigures(1, 1, 2, 2, [1, 1])),
    ],
)
def test_figures_of_a_whole_round(
    origins: list[TokenOrigin], draft_tokens: int, figures: SpeculationFigures
) -> None:
    commit = step()
    commit.commit(ids("abcd")[: len(origins)], origins, draft_tokens)
    assert commit.figures == figures


def test_figures_of_a_cut_round_count_what_was_kept() -> None:
    commit = step(stop=("b",))
    commit.commit(ids("abcde"), [ACCEPTED] * 4 + [BONUS], 4)
    assert commit.figures == SpeculationFigures(1, 1, 2, 2, [1, 1])
    assert commit.commit(ids("xy"), [ACCEPTED, RECOVERED], 3) == []
    assert commit.figures == SpeculationFigures(1, 1, 2, 2, [1, 1])
    assert commit.flush() == ""


def test_a_stop_string_wins_over_the_cap_and_the_first_reason_stays() -> None:
    commit = step(stop=("b",), max_tokens=2)
    assert rounds(commit, ids("abc"), 4) == ("a", ids("ab"))
    commit.end(FinishReason.CANCELLED)
    assert commit.finish_reason is FinishReason.STOP


@given(
    text=st.text("ab🙂世", max_size=12),
    stop=st.lists(st.text("ab🙂", min_size=1, max_size=3), max_size=2).map(tuple),
    max_tokens=st.integers(1, 30),
    k=st.integers(0, 5),
    include_stop=st.booleans(),
)
def test_output_does_not_depend_on_the_draft_length(
    text: str, stop: tuple[str, ...], max_tokens: int, k: int, include_stop: bool
) -> None:
    token_ids = [*ids(text), EOS]
    plain, speculative = (
        step(stop=stop, max_tokens=max_tokens, include_stop=include_stop) for _ in range(2)
    )
    assert rounds(plain, token_ids, 0) == rounds(speculative, token_ids, k)
    assert plain.finish_reason is speculative.finish_reason


@given(
    st.text(alphabet="ab</x>é€😀", max_size=30),
    st.lists(st.sampled_from(["ab", "</x>", "€"]), max_size=2),
    st.integers(0, 40),
    st.integers(1, 30),
    st.booleans(),
)
def test_what_is_replayed_from_the_log_goes_on_as_if_nothing_had_happened(
    text: str, stop: list[str], logged: int, max_tokens: int, include_stop: bool
) -> None:
    def fresh() -> CommitStep:
        return step(stop=tuple(stop), max_tokens=max_tokens, include_stop=include_stop)

    token_ids = [*ids(text), EOS]
    whole, again = fresh(), fresh()
    pieces = whole.commit(token_ids, [PLAIN] * len(token_ids))
    kept = whole.token_ids[:logged]
    logprobs = logprobs_of(kept)
    replayed = again.replay(kept, logprobs)
    assert [piece.logprobs for piece in replayed] == logprobs
    assert {piece.origin for piece in replayed} <= {None}
    assert again.figures == SpeculationFigures()
    rest = again.commit(token_ids[len(kept) :], [PLAIN] * (len(token_ids) - len(kept)))
    assert [(p.token_id, p.text) for p in pieces] == [
        (p.token_id, p.text) for p in [*replayed, *rest]
    ]
    assert (again.finish_reason, again.flush()) == (whole.finish_reason, whole.flush())
