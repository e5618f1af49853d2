"""TLS files: what is refused, and what a running process makes of files that change."""

from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from outrider.errors import ConfigError
from outrider.tls import SYSTEM, Tls, TlsFiles
from tests.support.certificates import Authority, tls_of, write_all, write_pair


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def directory(tmp_path: Path, authority: Authority) -> Path:
    return write_all(tmp_path, authority)


def generation(files: TlsFiles) -> int:
    return files.channel_credentials()[0]


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tls-ca"):
        Tls(ca="")
    with pytest.raises(ConfigError, match="go together"):
        Tls(ca="ca.crt", cert="tls.crt")


def test_files_that_can_not_be_used_are_refused_by_name(
    directory: Path, authority: Authority
) -> None:
    with pytest.raises(ConfigError, match=r"can't read --tls-ca .*none.crt"):
        TlsFiles(Tls(ca=str(directory / "none.crt")))
    key = str(directory / "client.key")
    with pytest.raises(ConfigError, match=r"--tls-ca .*client.key has no certificates"):
        TlsFiles(Tls(ca=key))
    cert = str(directory / "coordinator.crt")
    with pytest.raises(ConfigError, match=r"coordinator.crt and --tls-key .*client.key"):
        TlsFiles(Tls(ca=str(directory / "ca.crt"), cert=cert, key=key))


def test_a_server_needs_a_certificate_and_authorities_of_its_own(directory: Path) -> None:
    with pytest.raises(ConfigError, match="a server needs"):
        TlsFiles(Tls(ca=str(directory / "ca.crt"))).server_credentials(require_client=True)
    own = tls_of(directory, "client")
    with pytest.raises(ConfigError, match="a server needs"):
        TlsFiles(Tls(ca=SYSTEM, cert=own.cert, key=own.key)).server_credentials(require_client=True)


def test_credentials_are_made_anew_when_the_files_change(
    directory: Path, authority: Authority
) -> None:
    files = TlsFiles(tls_of(directory, "client"))
    first = files.channel_credentials()
    assert files.channel_credentials() == first
    write_pair(directory, "client", authority.issue_part("client"))
    second = files.channel_credentials()
    assert second[0] > first[0]
    assert second[1] is not first[1]
    (directory / "ca.crt").write_bytes(authority.cert + Authority("another").cert)
    assert generation(files) > second[0]


def test_the_last_good_files_count_while_they_are_written(
    directory: Path, authority: Authority
) -> None:
    """A certificate without its key, half a key, half an authority, nothing: told once."""
    structlog.reset_defaults()
    files = TlsFiles(tls_of(directory, "client"))
    first = files.channel_credentials()
    pair = authority.issue_part("client")
    broken = {
        "client.crt": [pair.cert, pair.cert[:200], b""],
        "client.key": [pair.key, pair.key[:100], b""],
        "ca.crt": [authority.cert[:300], authority.cert + authority.cert[:300], b"rubbish"],
    }
    with capture_logs() as logs:
        for name, contents in broken.items():
            path = directory / name
            good = path.read_bytes()
            for content in contents:
                path.write_bytes(content)
                assert files.channel_credentials() == first
            path.unlink()
            assert files.channel_credentials() == first
            path.write_bytes(good)
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert len(warnings) == 1, warnings
    # Once they are good again they count, and the next trouble is told again.
    write_pair(directory, "client", pair)
    assert generation(files) > first[0]
    with capture_logs() as logs:
        (directory / "client.key").write_bytes(b"")
        generation(files)
    assert [line["log_level"] for line in logs] == ["warning"]
    assert "PRIVATE KEY" not in str(logs + warnings)
