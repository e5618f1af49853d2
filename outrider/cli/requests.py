"""The settings that `generate` and `chat` share, and the options of a request they mean."""

from dataclasses import dataclass

from outrider.client import DEFAULT_ADDRESS, GenerateOptions
from outrider.config import setting
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """Where to ask, and how to sample."""

    server: str = setting(DEFAULT_ADDRESS, help="Address of the coordinator, HOST:PORT.")
    max_tokens: int | None = setting(
        None, at_least=1, help="Most tokens to generate; up to the context limit if not given."
    )
    temperature: float = setting(0.0, at_least=0, help="0 is greedy.")
    top_p: float = setting(1.0, at_least=0, at_most=1, help="1 keeps every token.")
    top_k: int = setting(0, at_least=0, help="0 keeps every token.")
    seed: int | None = setting(
        None, at_least=0, at_most=2**64 - 1, help="Same seed, same text; drawn if not given."
    )
    stop: tuple[str, ...] = setting((), many=True, help="Text that ends the answer; repeatable.")
    speculation: str = setting("on", choices=("on", "off"), help="Whether to speculate.")
    draft_len: int = setting(0, at_least=0, help="Draft length of a round; 0 leaves it open.")
    color: bool = setting(True, help="Show in colour where each token came from.")

    def __post_init__(self) -> None:
        if self.speculation == "off" and self.draft_len:
            raise ConfigError("--draft-len is of no use with --speculation off")

    def options(self) -> GenerateOptions:
        """The request's options, less its prompt."""
        speculation: bool | int = self.speculation == "on"
        return GenerateOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=self.stop,
            speculation=self.draft_len or speculation,
        )
