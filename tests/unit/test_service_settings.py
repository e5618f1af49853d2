"""TLS settings of the services: what is refused, and that roles follow from them."""

from pathlib import Path
from typing import Any

import pytest

import coordinator.config
import draft_worker.config
import verify_worker.config
from outrider.errors import ConfigError
from outrider.service_settings import ServiceSettings
from tests.support.certificates import Authority, tls_of, write_all

SERVICES: list[type[ServiceSettings]] = [
    coordinator.config.Settings,
    verify_worker.config.Settings,
    draft_worker.config.Settings,
]
FILES = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}


def make(service: type[ServiceSettings], **settings: Any) -> ServiceSettings:
    needed = {} if service is draft_worker.config.Settings else {"model": "m"}
    return service(redis_url="redis://127.0.0.1:1", **needed, **settings)


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_takes_all_three_files_or_none(service: type[ServiceSettings]) -> None:
    plain = make(service)
    assert plain.open_tls() is None
    assert plain.peer_checks("x") == []
    for missing in FILES:
        with pytest.raises(ConfigError, match="go together"):
            make(service, **{name: path for name, path in FILES.items() if name != missing})
    with pytest.raises(ConfigError, match="trust everybody"):
        make(service, **FILES | {"tls_ca": "system"})
    with pytest.raises(ConfigError, match="--allow-peer needs TLS"):
        make(service, allow_peer=("x",))
    assert len(make(service, **FILES).peer_checks("x")) == 1


def test_names_are_of_no_use_where_nobody_shows_one() -> None:
    with pytest.raises(ConfigError, match="--allow-peer is of no use"):
        make(coordinator.config.Settings, **FILES, allow_peer=("x",), tls_client_auth="none")


def test_files_are_checked_when_they_are_opened(tmp_path: Path) -> None:
    own = tls_of(write_all(tmp_path, Authority()), "coordinator")
    files = {"tls_ca": own.ca, "tls_cert": own.cert, "tls_key": own.key}
    opened = make(coordinator.config.Settings, **files).open_tls("verify-worker.outrider")
    assert opened is not None
    assert opened.options_for("host") == [
        ("grpc.ssl_target_name_override", "verify-worker.outrider")
    ]
    Path(own.key).unlink()
    with pytest.raises(ConfigError, match="can't read --tls-key"):
        make(coordinator.config.Settings, **files).open_tls()
