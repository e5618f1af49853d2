"""How commands say who asks: tokens, certificates, and what is told of a token in plaintext."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider._credentials import PlaintextTokenWarning
from outrider.cli import main
from outrider.cli.status import Settings
from outrider.client import AsyncClient, Client, Tls
from outrider.errors import ConfigError
from outrider.pb.v1 import coordinator_pb2 as pb
from tests.support.certificates import Authority, tls_of, write_all
from tests.support.fake_coordinator import serving_in_thread

TOKEN = "outrider-00000000-secret"


def status(*flags: str, **env: str) -> Result:
    return CliRunner().invoke(main, ["status", "--json", *flags], env=env)


def test_a_token_reaches_the_coordinator_and_nobody_sees_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    seen: list[str] = []

    async def noting(_: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        seen.append(dict(context.invocation_metadata())["authorization"])
        return pb.GetStatusResponse()

    with serving_in_thread([]) as fake:
        fake.get_status = noting
        for done in (
            status("--coordinator", fake.address, "--token", TOKEN),
            status("--coordinator", fake.address, "--token-file", str(path)),
            status("--coordinator", fake.address, OUTRIDER_TOKEN=TOKEN),
        ):
            assert (done.exit_code, done.stderr) == (0, "")
            assert TOKEN not in done.output
    assert seen == [f"Bearer {TOKEN}"] * 3
    assert TOKEN not in repr(Settings(token=TOKEN))
    assert TOKEN not in status("--help", OUTRIDER_TOKEN=TOKEN).output


def test_a_token_that_others_can_read_is_told_of() -> None:
    with pytest.warns(PlaintextTokenWarning, match="plaintext"):
        Client("192.0.2.1:1", token=TOKEN).close()
    with pytest.warns(PlaintextTokenWarning) as caught:
        AsyncClient(["127.0.0.1:1", "elsewhere.example:1"], token=TOKEN)
    assert caught[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        for address in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
            Client(address, token=TOKEN).close()
        Client("192.0.2.1:1", token=TOKEN, tls=Tls(ca="system")).close()
        Client("192.0.2.1:1").close()
    client = Settings(coordinator=("192.0.2.1:1",), token=TOKEN)
    with warnings.catch_warnings(action="error"):
        client.client().close()


@pytest.mark.parametrize("token", ["secret b\n", " secret", "secretä"])
def test_a_token_is_plain_text_and_is_not_repeated(token: str) -> None:
    with pytest.raises(ConfigError, match="a token is printable") as caught:
        Client(token=token)
    assert "secret" not in caught.value.message


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    both = status("--token", TOKEN, "--token-file", "x")
    assert both.exit_code == 1
    assert "one of them" in both.stderr
    assert "can't read --token-file" in status("--token-file", str(tmp_path / "none")).stderr
    tls = tls_of(write_all(tmp_path, Authority()), "client")
    assert "need --tls-ca" in status("--tls-cert", tls.cert, "--tls-key", tls.key).stderr
    assert "go together" in status("--tls-ca", tls.ca, "--tls-cert", tls.cert).stderr
    assert "has no certificates" in status("--tls-ca", tls.key).stderr
