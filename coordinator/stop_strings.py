"""Stop strings in a text that comes in pieces."""


class StopStrings:
    """Lets text through up to the first stop string, and holds back what may become one.

    The first stop string is the one that is complete first; of two that end at the same
    character, the longer. How the text is cut into pieces makes no difference.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string ends it there."""
        if not self._stop:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        shown = len(text) - self._possible_chars(text)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """The text that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _possible_chars(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(max(map(len, self._stop)) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
