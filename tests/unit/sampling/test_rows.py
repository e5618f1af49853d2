import pytest

from outrider.messages import SamplingParams
from outrider.sampling.rows import Row


@pytest.mark.parametrize(
    ("committed", "drafted", "prompt_len", "completion"),
    [
        ((5, 6, 7), (), 3, []),
        ((5, 6, 7), (8, 9), 3, [8, 9]),
        ((5, 6, 7), (8, 9), 1, [6, 7, 8, 9]),
        ((5, 6, 7), (), 0, [5, 6, 7]),
    ],
)
def test_a_draft_row_is_placed_as_if_its_draft_were_committed(
    committed: tuple[int, ...],
    drafted: tuple[int, ...],
    prompt_len: int,
    completion: list[int],
) -> None:
    row = Row(SamplingParams(), committed, drafted, prompt_len)
    assert row.completion == completion
    assert row.completion_len == len(completion)
    assert row.position == len(committed) + len(drafted)
