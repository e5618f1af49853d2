"""The settings of a draft worker."""

from dataclasses import dataclass

from outrider.config import setting
from outrider.errors import ConfigError
from outrider.logs import LEVELS
from outrider.memory import parse_bytes
from outrider.service_settings import ServiceSettings

NGRAM, SUFFIX, MODEL, EARLY_EXIT, HYBRID = "ngram", "suffix", "model", "early-exit", "hybrid"
DRAFTERS = (NGRAM, SUFFIX, MODEL, EARLY_EXIT, HYBRID)
WITH_DRAFT_MODEL = (MODEL, HYBRID)
RUNNING_A_MODEL = (*WITH_DRAFT_MODEL, EARLY_EXIT)


@dataclass(frozen=True, slots=True)
class Settings(ServiceSettings):
    """One draft worker."""

    redis_url: str = setting(help="Redis with the registry, such as redis://127.0.0.1:6379/0.")
    redis_password_file: str = setting(
        "", help="File with the password of Redis; it is read again for each connection."
    )
    drafter: str = setting(
        NGRAM,
        choices=DRAFTERS,
        help="ngram looks up the session's own text, suffix that and earlier outputs; model runs "
        "a draft model, early-exit the target's first layers, hybrid suffix beside a model.",
    )
    draft_model: str = setting(
        "", help="For --drafter model and hybrid: a transformers directory or a .gguf file."
    )
    target: str = setting(
        "",
        help="The target model; its tokenizer is compared with the draft model's at start, "
        "--drafter early-exit runs its first layers, and a drafter that was trained for it reads "
        "its embeddings and head.",
    )
    exit_layers: int = setting(
        0, at_least=0, help="For --drafter early-exit: how many layers; 0 is a quarter of them."
    )
    ngram_max: int = setting(4, at_least=1, help="Longest n-gram to look up, in tokens.")
    ngram_min: int = setting(2, at_least=1, help="Shortest n-gram to look up, in tokens.")
    tree_width: int = setting(
        1,
        at_least=1,
        help="Tokens that a model proposes for each place; above 1 drafts are trees.",
    )
    suffix_memory: str = setting(
        "256MiB", help="Memory for the indexes of --drafter suffix and hybrid, such as 256MiB."
    )
    share_outputs: bool = setting(
        True,
        help="With --drafter suffix and hybrid, draft from what other sessions of the same model "
        "said too.",
    )
    max_sessions: int = setting(256, at_least=1, help="Sessions held at once; more are refused.")
    kv_memory: str = setting("512MiB", help="Memory for the draft model's KV, such as 512MiB.")
    prefill_chunk: int = setting(
        256, at_least=16, help="Prompt tokens to prefill between the proposals of other sessions."
    )
    engine_silence_s: float = setting(
        30.0, at_least=1, help="Seconds that the engine may hang before the worker is not alive."
    )
    threads: int = setting(0, at_least=0, help="Threads of torch; 0 leaves it to torch.")
    drain_timeout_s: float = setting(
        10.0, at_least=0, help="Seconds that sessions get to move elsewhere after SIGTERM."
    )
    host: str = setting("127.0.0.1", help="Address to listen on; :: is all, IPv4 too.")
    port: int = setting(0, at_least=0, at_most=65535, help="Port to listen on; 0 takes a free one.")
    advertise_host: str = setting("", help="Host that verify workers reach this one at.")
    worker_id: str = setting("", help="Name in the registry; made up when empty.")
    log_level: str = setting("info", choices=LEVELS, help="Least severe level to log.")
    otlp_endpoint: str | None = setting(None, help="OTLP gRPC collector for traces and metrics.")
    metrics_port: int = setting(
        0, at_least=0, at_most=65535, help="Port of the Prometheus page; 0 is none."
    )

    def __post_init__(self) -> None:
        ServiceSettings.__post_init__(self)
        parse_bytes(self.kv_memory)
        parse_bytes(self.suffix_memory)
        with_draft_model = self.drafter in WITH_DRAFT_MODEL
        if with_draft_model and not self.draft_model:
            raise ConfigError(f"--drafter {self.drafter} needs --draft-model PATH")
        if not with_draft_model and self.draft_model:
            raise ConfigError(f"--draft-model is of no use to --drafter {self.drafter}")
        if self.drafter == EARLY_EXIT and not self.target:
            raise ConfigError(f"--drafter {self.drafter} needs --target PATH")
        if self.drafter != EARLY_EXIT and self.exit_layers:
            raise ConfigError(f"--exit-layers is of no use to --drafter {self.drafter}")
        if self.drafter not in RUNNING_A_MODEL and self.tree_width > 1:
            raise ConfigError(f"--tree-width is of no use to --drafter {self.drafter}")
        if self.ngram_min > self.ngram_max:
            raise ConfigError("--ngram-min is above --ngram-max")
