"""Settings of the coordinator."""

from dataclasses import dataclass

from outrider.callers import VERIFY_WORKER_NAME
from outrider.config import setting
from outrider.errors import ConfigError
from outrider.logs import LEVELS
from outrider.service_settings import ServiceSettings

REQUIRE, NONE = "require", "none"


@dataclass(frozen=True)
class Settings(ServiceSettings):
    """What `python -m coordinator` takes."""

    model: str = setting(
        help="Target model: a directory or .gguf file, for its tokenizer and config (no weights)."
    )
    redis_url: str = setting(help="Redis with sessions and workers: redis://HOST:PORT/DB.")
    redis_password_file: str = setting(
        "", help="File with the password of Redis; it is read again for each connection."
    )
    served_name: str = setting("", help="Name of the model for clients (default: the path's name).")
    host: str = setting("127.0.0.1", help="Address to listen on; :: is all, IPv4 too.")
    port: int = setting(
        7070, at_least=0, at_most=65535, help="Port to listen on; 0 takes any free one."
    )
    worker_id: str = setting("", help="Name of this coordinator (default: generated).")
    tokens: tuple[str, ...] = setting(
        (),
        many=True,
        help="File with the tokens of clients, from `outrider token create`; repeatable; without "
        "one a call needs no token.",
    )
    tls_client_auth: str = setting(
        REQUIRE,
        choices=(REQUIRE, NONE),
        help="Whether clients must show a certificate, of --tls-ca and with a name of "
        "--allow-peer.",
    )
    verify_worker_name: str = setting(
        VERIFY_WORKER_NAME,
        help="DNS name that the certificates of verify workers have; empty: the host of each.",
    )
    trust_draft_worker: tuple[str, ...] = setting(
        (),
        many=True,
        help="Id of a draft worker whose reported distributions are trusted, which the rejection "
        "rule needs; repeatable; `all` trusts every one.",
    )
    place_wait_s: float = setting(
        5.0, help="Seconds that a new session waits for a verify worker to be up.", at_least=0
    )
    replace_wait_s: float = setting(
        60.0,
        help="Seconds that a session whose verify worker went away waits for another one.",
        at_least=0,
    )
    verify_silence_s: float = setting(
        5.0,
        help="Seconds that a verify worker may say nothing, or its engine hang, before its "
        "sessions are placed elsewhere.",
        at_least=1,
    )
    max_sessions: int = setting(
        0, help="Sessions at once; 0 is as many as the verify workers take.", at_least=0
    )
    max_queued: int = setting(
        256, help="Requests that may wait for room; more are told to come back later.", at_least=0
    )
    queue_wait_s: float = setting(30.0, help="Seconds that a request waits for room.", at_least=0)
    tenant_sessions: int = setting(
        0, help="Sessions at once of one tenant; 0 is no limit.", at_least=0
    )
    unread_s: float = setting(
        30.0,
        help="Seconds that a client may leave its stream unread before its session is paused; it "
        "can resume.",
        at_least=1,
    )
    drain_timeout_s: float = setting(
        30.0, help="Seconds that running sessions get to finish after SIGTERM.", at_least=0
    )
    finished_ttl_s: float = setting(
        3600.0, help="Seconds that the records of finished sessions are kept.", at_least=1
    )
    paused_ttl_s: float = setting(
        3600.0, help="Seconds that a session which nobody follows can be resumed.", at_least=1
    )
    lease_s: float = setting(
        6.0,
        help="Seconds without a sign of its coordinator after which a running session counts as "
        "left behind.",
        at_least=2,
    )
    log_level: str = setting("info", help="Least severe log lines to write.", choices=LEVELS)
    otlp_endpoint: str | None = setting(
        None, help="OTLP gRPC address for traces and metrics, such as http://collector:4317."
    )
    metrics_port: int = setting(
        0, at_least=0, at_most=65535, help="Port of a Prometheus page; 0 opens none."
    )

    def __post_init__(self) -> None:
        ServiceSettings.__post_init__(self)
        if self.allow_peer and self.tls_client_auth == NONE:
            raise ConfigError("--allow-peer is of no use with --tls-client-auth none")
