"""What makes two verify workers interchangeable."""

from dataclasses import dataclass

# The arithmetic of a compiled forward, and what follows the type of weights in fewer bits.
COMPILED = "compiled"
PACKED = "-packed"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Weights and the way of computing with them: where all agree, so do the tokens.

    Rounding decides between tokens that are nearly tied, so a session that went on with another
    type or other numerics would not say what it would have said.
    """

    fingerprint: str
    dtype: str
    numerics: str

    @property
    def flags(self) -> str:
        """What starts a verify worker that computes like this."""
        choice = "forward" if self.numerics == COMPILED else "numerics"
        return f"--dtype {self.dtype.removesuffix(PACKED)} --{choice} {self.numerics}"

    @property
    def computing(self) -> str:
        """How the weights are computed with, such as float32/fast."""
        return f"{self.dtype}/{self.numerics}"
