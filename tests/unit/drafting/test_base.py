import inspect

import pytest

from outrider.drafting.base import Drafter, check_base_len, check_token_ids
from outrider.drafting.model import ModelDrafter
from outrider.drafting.ngram import NgramDrafter
from outrider.errors import FencedError, InvalidRequestError


@pytest.mark.parametrize("kind", [NgramDrafter, ModelDrafter])
def test_every_drafter_has_the_interface(kind: type) -> None:
    assert isinstance(inspect.getattr_static(kind, "name"), property)
    for method in ("open", "propose", "commit", "close"):
        assert inspect.signature(getattr(kind, method)) == inspect.signature(
            getattr(Drafter, method)
        )


@pytest.mark.parametrize("ids", [[-1], [0, 128], [2**40]])
def test_ids_outside_of_the_vocabulary_are_refused_by_name(ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match=str(ids[-1])):
        check_token_ids(ids, 128)
    check_token_ids([0, 127], 128)
    check_token_ids([], 128)


def test_only_what_continues_is_taken() -> None:
    check_base_len(3, 3)
    for base_len in (2, 4):
        with pytest.raises(FencedError, match=f"{base_len} tokens, but 3"):
            check_base_len(base_len, 3)
