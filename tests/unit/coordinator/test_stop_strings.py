from hypothesis import given
from hypothesis import strategies as st

from coordinator.stop_strings import StopStrings

LETTERS = st.text("abc", max_size=12)


def read(stop: tuple[str, ...], pieces: list[str], *, include: bool) -> tuple[str, bool]:
    strings = StopStrings(stop, include=include)
    shown = ""
    for piece in pieces:
        text, cut = strings.push(piece)
        shown += text
        if cut:
            return shown, True
    return shown + strings.flush(), False


def first_stop(stop: tuple[str, ...], text: str, *, include: bool) -> tuple[str, bool]:
    """The rule, said plainly: read on character by character until some stop string is there."""
    for end in range(len(text) + 1):
        begun = [end - len(word) for word in stop if text[:end].endswith(word)]
        if begun:
            return text[: end if include else min(begun)], True
    return text, False


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
    st.lists(LETTERS),
    st.booleans(),
)
def test_pieces_make_no_difference(stop: tuple[str, ...], pieces: list[str], include: bool) -> None:
    whole = first_stop(stop, "".join(pieces), include=include)
    assert read(stop, pieces, include=include) == whole


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    strings = StopStrings(("END", "\n\n"))
    assert strings.push("the EN") == ("the ", False)
    assert strings.push("EN") == ("EN", False)
    assert strings.push("x\n") == ("ENx", False)
    assert strings.push("\n more") == ("", True)


def test_nothing_is_held_back_of_text_that_is_shown_in_any_case() -> None:
    strings = StopStrings(("END", "\n\n"), include=True)
    assert strings.push("the EN") == ("the EN", False)
    assert strings.push("EN") == ("EN", False)
    assert strings.push("Dx") == ("D", True)
    assert strings.flush() == ""


def test_without_stop_strings_all_text_passes() -> None:
    strings = StopStrings(())
    assert strings.push("any") == ("any", False)
    assert strings.flush() == ""
