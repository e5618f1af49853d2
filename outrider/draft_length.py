"""How a draft length k is written: `auto`, chosen each round, or `fixed:N`."""

from outrider.errors import ConfigError

AUTO = "auto"
FIXED = "fixed:"
# How it is written, for help texts.
METAVAR = f"{AUTO} or {FIXED}N"


def parse_draft_length(text: str) -> int:
    """The fixed length in tokens; 0 is `auto`.

    Raises:
        ConfigError: the text is neither `auto` nor `fixed:N` with N from 1.
    """
    if text == AUTO:
        return 0
    number = text.removeprefix(FIXED)
    if number == text or not number.isascii() or not number.isdigit() or not int(number):
        raise ConfigError(f"a draft length is {AUTO} or {FIXED}N with N from 1, not {text!r}")
    return int(number)


def format_draft_length(fixed: int) -> str:
    """The inverse of `parse_draft_length`."""
    return f"{FIXED}{fixed}" if fixed else AUTO
