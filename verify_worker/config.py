"""The settings of a verify worker."""

from dataclasses import dataclass

from outrider.callers import DRAFT_WORKER_NAME
from outrider.config import setting
from outrider.draft_length import parse_draft_length
from outrider.errors import ConfigError
from outrider.logs import LEVELS
from outrider.memory import parse_bytes
from outrider.service_settings import ServiceSettings

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Settings(ServiceSettings):
    """One verify worker."""

    model: str = setting(help="The target: a transformers directory or a .gguf file.")
    redis_url: str = setting(help="Redis with the registry, such as redis://127.0.0.1:6379/0.")
    redis_password_file: str = setting(
        "", help="File with the password of Redis; it is read again for each connection."
    )
    dtype: str = setting(
        "float32", choices=("float32", "bfloat16", "float16"), help="Type of weights and KV."
    )
    numerics: str = setting(
        "fast",
        choices=("fast", "invariant"),
        help="invariant: a session's logits have the same bits whatever shares its steps; slower "
        "where the forward is not compiled.",
    )
    forward: str = setting(
        "auto",
        choices=("auto", "compiled", "lean", "module"),
        help="compiled: one function made for this processor (float32 on CPU, Llama-like models); "
        "lean: a loop over fused operators; module: the model's own code; auto: the best.",
    )
    linears: str = setting(
        "auto",
        choices=("auto", "dense", "onednn", "mkl"),
        help="How to multiply by weights; auto measures, and keeps those of a .gguf file packed.",
    )
    attention: str = setting(
        "sdpa",
        choices=("sdpa", "flex"),
        help="Attention over pages: sequence by sequence, or in one kernel (CUDA).",
    )
    device: str = setting("cpu", help="Where the model runs: cpu, cuda, cuda:1.")
    tensor_parallel_size: int = setting(
        1,
        at_least=1,
        help="Ranks that the model is split over, with Ray; 1 needs no Ray. See --ray-address.",
    )
    ray_address: str = setting(
        "", help="A Ray that runs, such as 10.0.0.1:6379; empty starts one for this worker alone."
    )
    ray_strategy: str = setting(
        "pack",
        choices=("pack", "spread"),
        help="pack: all ranks on this host; spread: over the hosts of the cluster.",
    )
    rank_port: int = setting(
        0, at_least=0, at_most=65535, help="Port where the ranks meet; 0 takes a free one."
    )
    rank_timeout_s: float = setting(
        5.0,
        at_least=0.5,
        help="Seconds that a rank may let the others wait in a step before all of them end.",
    )
    rank_start_s: float = setting(
        300.0, at_least=1, help="Seconds for the ranks to start, and again to load."
    )
    k: str = setting(
        AUTO,
        help="Draft length of a round: auto, by expected value, or fixed:N tokens; requests and "
        "the policy go before it.",
    )
    max_draft_len: int = setting(16, at_least=1, help="Most tokens of a draft, whoever asks.")
    max_tree_nodes: int = setting(
        64, at_least=0, help="Most tokens of a draft that is a tree; 0 takes chains only."
    )
    draft_wait_s: float = setting(
        0.0, at_least=0, help="Longest wait for a draft; 0 lets measurements decide."
    )
    q_top: int = setting(
        64,
        at_least=0,
        help="Tokens that a drafter's distribution has under the rejection rule; 0 is all.",
    )
    max_sessions: int = setting(64, at_least=1, help="Sessions in a step; more wait their turn.")
    step_tokens: int = setting(
        256, at_least=16, help="Rows of a step; prompts are prefilled in chunks that fit."
    )
    prefill_slowdown: float = setting(
        3.0,
        at_least=1,
        help="A step that also prefills takes at most so many times a step that does not.",
    )
    calibrate: bool = setting(True, help="Time a few steps at start, for up to 2 s.")
    kv_memory: str = setting(
        AUTO,
        help="Memory for the target's KV on each rank, such as 512MiB; auto: a share of what is "
        "free.",
    )
    prefix_cache: bool = setting(
        True,
        help="Keep the KV of prompts and answers for sessions that begin with the same tokens.",
    )
    engine_silence_s: float = setting(
        5.0, at_least=1, help="Seconds that the engine may hang before the worker is unhealthy."
    )
    threads: int = setting(0, at_least=0, help="Threads of torch; 0 leaves it to torch.")
    drain_timeout_s: float = setting(
        30.0, at_least=0, help="Seconds that sessions get to finish after SIGTERM."
    )
    host: str = setting("127.0.0.1", help="Address to listen on; :: is all, IPv4 too.")
    port: int = setting(0, at_least=0, at_most=65535, help="Port to listen on; 0 takes a free one.")
    advertise_host: str = setting("", help="Host that coordinators reach this worker at.")
    draft_worker_name: str = setting(
        DRAFT_WORKER_NAME,
        help="DNS name that the certificates of draft workers have; empty: the host of each.",
    )
    worker_id: str = setting("", help="Name in the registry; made up when empty.")
    log_level: str = setting("info", choices=LEVELS, help="Least severe level to log.")
    otlp_endpoint: str | None = setting(None, help="OTLP gRPC collector for traces and metrics.")
    metrics_port: int = setting(
        0, at_least=0, at_most=65535, help="Port of the Prometheus page; 0 is none."
    )

    def __post_init__(self) -> None:
        ServiceSettings.__post_init__(self)
        parse_draft_length(self.k)
        if self.kv_memory != AUTO:
            parse_bytes(self.kv_memory)
        if self.tensor_parallel_size > 1:
            self._check_split()

    def _check_split(self) -> None:
        """What can't be kept over several ranks is refused before any is started."""
        over = f"over {self.tensor_parallel_size} ranks"
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(
                f"--device {self.device} can't be had {over}: Ray gives each rank a device of its "
                "own; use --device cuda, with CUDA_VISIBLE_DEVICES set for Ray if it is to be "
                "certain GPUs, or --device cpu"
            )
        if self.numerics != "fast":
            raise ConfigError(
                f"--numerics {self.numerics} is not kept {over}: the order of sums over ranks "
                "depends on the rows of a step; use --numerics fast"
            )
        if self.forward == "compiled":
            raise ConfigError(
                f"--forward {self.forward} can't be split {over}: it knows no other ranks; use "
                "--forward auto"
            )
