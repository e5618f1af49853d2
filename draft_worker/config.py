"""The settings of a draft worker."""

from dataclasses import dataclass

from outrider.config import setting
from outrider.errors import ConfigError
from outrider.logs import LEVELS
from outrider.memory import parse_bytes

DRAFTERS = ("ngram", "model")


@dataclass(frozen=True, slots=True)
class Settings:
    """One draft worker."""

    redis_url: str = setting(help="Redis with the registry, such as redis://127.0.0.1:6379/0.")
    drafter: str = setting(
        "ngram", choices=DRAFTERS, help="ngram looks up the session's own text; model runs one."
    )
    draft_model: str = setting(
        "", help="For --drafter model: a transformers directory or a .gguf file."
    )
    target: str = setting(
        "", help="The target model; its tokenizer is compared with the draft model's at start."
    )
    ngram_max: int = setting(4, at_least=1, help="Longest n-gram to look up, in tokens.")
    ngram_min: int = setting(2, at_least=1, help="Shortest n-gram to look up, in tokens.")
    tree_width: int = setting(
        1,
        at_least=1,
        help="For --drafter model: tokens proposed for each place; above 1 drafts are trees.",
    )
    max_sessions: int = setting(256, at_least=1, help="Sessions held at once; more are refused.")
    kv_memory: str = setting("512MiB", help="Memory for the draft model's KV, such as 512MiB.")
    prefill_chunk: int = setting(
        256, at_least=16, help="Prompt tokens to prefill between the proposals of other sessions."
    )
    threads: int = setting(0, at_least=0, help="Threads of torch; 0 leaves it to torch.")
    drain_timeout_s: float = setting(
        10.0, at_least=0, help="Seconds that sessions get to move elsewhere after SIGTERM."
    )
    host: str = setting("127.0.0.1", help="Address to listen on.")
    port: int = setting(0, at_least=0, at_most=65535, help="Port to listen on; 0 takes a free one.")
    advertise_host: str = setting("", help="Host that verify workers reach this one at.")
    worker_id: str = setting("", help="Name in the registry; made up when empty.")
    log_level: str = setting("info", choices=LEVELS, help="Least severe level to log.")
    otlp_endpoint: str | None = setting(None, help="OTLP gRPC collector for traces and metrics.")
    metrics_port: int = setting(
        0, at_least=0, at_most=65535, help="Port of the Prometheus page; 0 is none."
    )

    def __post_init__(self) -> None:
        parse_bytes(self.kv_memory)
        if self.drafter == "model" and not self.draft_model:
            raise ConfigError("--drafter model needs --draft-model PATH")
        if self.drafter != "model" and self.draft_model:
            raise ConfigError(f"--draft-model is of no use to --drafter {self.drafter}")
        if self.drafter != "model" and self.tree_width > 1:
            raise ConfigError(f"--tree-width is of no use to --drafter {self.drafter}")
        if self.ngram_min > self.ngram_max:
            raise ConfigError("--ngram-min is above --ngram-max")
