"""Stop strings in a text that comes in pieces."""


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may become one.

    The first stop string is the one that is complete first; of two that end at the same
    character, the longer. How the text is cut into pieces makes no difference. With
    `include` the stop string itself is let through too, so that nothing need be held back.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        self._stop = stop
        self._include = include
        # The end of the text so far that may become a stop string.
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string ends it there."""
        if not self._stop:
            return text, False
        shown = len(self._held) if self._include else 0
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, begin = min(found)
            return text[shown : end if self._include else begin], True
        certain = len(text) - self._possible_chars(text)
        self._held = text[certain:]
        return text[shown:] if self._include else text[:certain], False

    def flush(self) -> str:
        """The text that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _possible_chars(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(max(map(len, self._stop)) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
