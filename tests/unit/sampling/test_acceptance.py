import pytest

from outrider.messages import Endings, FinishReason, TokenOrigin
from outrider.sampling.acceptance import verify_chain
from outrider.sampling.endings import first_ending

ACCEPTED, RECOVERED = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED
BONUS, PLAIN = TokenOrigin.BONUS, TokenOrigin.PLAIN


@pytest.mark.parametrize(
    ("draft", "targets", "tokens", "origins"),
    [
        ([], [7], (7,), (PLAIN,)),
        ([5], [7, 9], (7,), (RECOVERED,)),
        ([7], [7, 9], (7, 9), (ACCEPTED, BONUS)),
        ([7, 8], [7, 9, 3], (7, 9), (ACCEPTED, RECOVERED)),
        # What agrees after the first difference was drafted after the wrong token.
        ([1, 8, 3], [7, 8, 3, 4], (7,), (RECOVERED,)),
        ([7, 8, 3], [7, 8, 3, 4], (7, 8, 3, 4), (ACCEPTED, ACCEPTED, ACCEPTED, BONUS)),
    ],
)
def test_verify_chain(
    draft: list[int],
    targets: list[int],
    tokens: tuple[int, ...],
    origins: tuple[TokenOrigin, ...],
) -> None:
    verdict = verify_chain(draft, targets)
    assert verdict.token_ids == tokens
    assert verdict.origins == origins
    assert verdict.accepted == len(tokens) - 1
    assert verdict.draft_tokens == len(draft)


def test_a_cut_verdict_counts_what_was_kept() -> None:
    verdict = verify_chain([7, 8, 3], [7, 8, 3, 4])
    cut = verdict.cut(2)
    assert (cut.token_ids, cut.accepted, cut.draft_tokens) == ((7, 8), 2, 2)
    assert verdict.cut(4) is verdict
    assert verify_chain([5, 6], [7, 8, 9]).cut(1).draft_tokens == 2


@pytest.mark.parametrize(
    ("tokens", "before", "expected"),
    [
        ([4, 5, 6], 0, (3, None)),
        ([4, 9, 6], 0, (2, FinishReason.STOP)),
        ([9, 9], 0, (1, FinishReason.STOP)),
        ([4, 5, 6], 8, (2, FinishReason.LENGTH)),
        ([4, 9], 8, (2, FinishReason.STOP)),
        ([4, 9], 9, (1, FinishReason.LENGTH)),
    ],
)
def test_first_ending(
    tokens: list[int], before: int, expected: tuple[int, FinishReason | None]
) -> None:
    assert first_ending(tokens, before, Endings(10, frozenset({9}))) == expected
