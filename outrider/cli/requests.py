"""The settings that `generate` and `chat` share, and the options of a request they mean."""

from dataclasses import dataclass

from outrider.cli.connection import ConnectionSettings
from outrider.client import GenerateOptions
from outrider.config import setting
from outrider.draft_length import parse_draft_length
from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule

RULES = tuple(rule.value for rule in AcceptanceRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings(ConnectionSettings):
    """Where to ask, and how to sample."""

    max_tokens: int | None = setting(
        None, at_least=1, help="Most tokens to generate; up to the context limit if not given."
    )
    min_tokens: int = setting(0, at_least=0, help="No end-of-sequence token before so many tokens.")
    temperature: float = setting(0.0, at_least=0, help="0 is greedy.")
    top_p: float = setting(1.0, at_least=0, at_most=1, help="1 keeps every token.")
    top_k: int = setting(0, at_least=0, help="0 keeps every token.")
    min_p: float = setting(0.0, at_least=0, at_most=1, help="0 keeps every token.")
    repetition_penalty: float = setting(
        1.0, at_least=0, help="Above 1: every token of prompt and answer becomes less likely."
    )
    frequency_penalty: float = setting(
        0.0, at_least=-2, at_most=2, help="Taken off a token's logit for each time it was chosen."
    )
    presence_penalty: float = setting(
        0.0, at_least=-2, at_most=2, help="Taken off the logit of each token that was chosen."
    )
    logit_bias: tuple[str, ...] = setting(
        (), many=True, help="ID:BIAS, added to the logit of a token; repeatable."
    )
    bad_word: tuple[str, ...] = setting((), many=True, help="Text that never occurs; repeatable.")
    seed: int | None = setting(
        None, at_least=0, at_most=2**64 - 1, help="Same seed, same text; drawn if not given."
    )
    stop: tuple[str, ...] = setting((), many=True, help="Text that ends the answer; repeatable.")
    include_stop: bool = setting(False, help="Keep the stop text in the answer.")
    ignore_eos: bool = setting(False, help="Go on past the model's end-of-sequence tokens.")
    speculation: str | None = setting(
        None, choices=("on", "off"), help="Whether to speculate; the server's policy if not given."
    )
    k: str | None = setting(
        None,
        help="Draft length of each round, auto or fixed:N; the server's choice if not given.",
    )
    rule: str | None = setting(
        None, choices=RULES, help="How drafts are accepted; the server's policy if not given."
    )
    color: bool = setting(True, help="Show in colour where each token came from.")

    def __post_init__(self) -> None:
        if self.k is not None:
            parse_draft_length(self.k)
            if self.speculation == "off":
                raise ConfigError("--k is of no use with --speculation off")
        self._biases()  # refuse what can't be read before anything is asked

    def options(self) -> GenerateOptions:
        """The request's options, less its prompt."""
        speculation: bool | str | None = self.k
        if self.speculation is not None and self.k is None:
            speculation = self.speculation == "on"
        return GenerateOptions(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=self._biases(),
            bad_words=self.bad_word,
            seed=self.seed,
            stop=self.stop,
            include_stop=self.include_stop,
            ignore_eos=self.ignore_eos,
            speculation=speculation,
            rule=self.rule,
        )

    def _biases(self) -> dict[int, float]:
        biases: dict[int, float] = {}
        for given in self.logit_bias:
            token_id, _, bias = given.partition(":")
            try:
                biases[int(token_id)] = float(bias)
            except ValueError:
                raise ConfigError(
                    f"--logit-bias takes ID:BIAS, such as 50:-5, not {given!r}"
                ) from None
        return biases
