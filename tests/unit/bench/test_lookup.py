import pytest

from bench.answers import Said
from bench.lookup import Settings, costs
from bench.replay import replay
from outrider.drafting.ngram import NgramDrafter
from outrider.drafting.suffix import SuffixDrafter

PERIOD = [11, 12, 13, 14, 15]


def test_what_is_accepted_of_a_known_text() -> None:
    said = Said("all", PERIOD * 2, PERIOD * 4)
    (figures,) = replay(NgramDrafter(), [said], 4)
    # One plain token, then rounds of four and a bonus, the last one as far as the text goes.
    assert figures.rounds == 1 + 4
    assert figures.accepted_tokens == figures.draft_tokens == 15
    strange = Said("all", PERIOD * 2, [11, 99, 98, 97, 96, 95])
    (figures,) = replay(NgramDrafter(), [strange], 4)
    # Only after the first token is there anything to look up, and it is wrong.
    assert (figures.rounds, figures.draft_tokens, figures.accepted_tokens) == (6, 4, 0)


def test_the_texts_are_sessions_of_one_corpus() -> None:
    said = Said("all", [1, 2], [30, 31, 32, 33, 34, 35, 36, 37])
    first, second = replay(SuffixDrafter(), [said, said], 4)
    assert first.accepted_tokens == 0
    assert second.accepted_tokens > 4


@pytest.mark.parametrize("context", [64, 5000])
def test_every_drafter_is_timed_in_a_short_and_a_long_context(context: int) -> None:
    texts = {"one token": [7] * context}
    report = costs(texts, Settings(context=context, rounds=10))
    contexts = {row[2] for row in report.rows}
    assert contexts == {min(context, 2048), context}
    assert len(report.bars) == 3
    assert all(figures["proposal_us"]["count"] == 10 for figures in report.figures.values())
