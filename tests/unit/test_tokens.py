"""Tokens files: what is kept, what is refused, and that changes count."""

import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from outrider.errors import ConfigError
from outrider.tokens import Role, TokenFiles, append, new_token


def add(path: Path, tenant: str = "acme", role: Role = Role.TENANT) -> str:
    token, holder = new_token(tenant, role)
    append(str(path), holder)
    return token


def test_a_token_is_found_by_its_secret_of_which_nothing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token, admin = add(path), add(path, "ops", Role.ADMIN)
    files = TokenFiles([str(path)])
    found, boss = files.find(token), files.find(admin)
    assert found is not None
    assert boss is not None
    assert (found.tenant, found.role) == ("acme", Role.TENANT)
    assert (boss.tenant, boss.role) == ("ops", Role.ADMIN)
    secret = token.split("-", 2)[2]
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_nearly_a_token_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token, other = add(path), add(path)
    files = TokenFiles([str(path)])
    swapped = "-".join([*token.split("-", 2)[:2], other.split("-", 2)[2]])
    last = "A" if token[-1] != "A" else "B"
    for wrong in (
        "",
        "outrider",
        token[:-1],
        token + "x",
        token[:-1] + last,
        swapped,
        token + "\n",
    ):
        assert files.find(wrong) is None, wrong
    digest = path.read_text().split()[3]
    assert files.find(digest) is None


def test_files_are_read_again_and_the_last_good_one_counts(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    first, second = add(one), add(two)
    files = TokenFiles([str(one), str(two)])
    assert files.find(first)
    assert files.find(second)
    later = add(one)
    assert files.find(later)
    with capture_logs() as logs:
        for content in (one.read_text()[:-10], "acme tenant"):
            one.write_text(content)
            assert files.find(first)
            assert files.find(later)
    assert [line["log_level"] for line in logs] == ["warning"]
    # A line that is taken out ends its token.
    one.write_text("# nobody\n\n")
    assert files.find(first) is None
    assert files.find(second)


def test_a_line_cut_off_before_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    first = add(path)
    path.write_text(path.read_text().rstrip("\n"))
    second = add(path)
    files = TokenFiles([str(path)])
    assert files.find(first)
    assert files.find(second)


@pytest.mark.parametrize(
    "line",
    [
        "00000000 acme tenant",
        "xyz acme tenant " + "0" * 64,
        "00000000 ac/me tenant " + "0" * 64,
        "00000000 acme boss " + "0" * 64,
        "00000000 acme tenant " + "0" * 63,
    ],
)
def test_a_line_that_is_none_is_refused_by_number_and_not_repeated(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# tokens\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        TokenFiles([str(path)])
    assert line.split()[-1] not in caught.value.message.replace("ID TENANT ROLE SHA256", "")


def test_an_id_is_of_one_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    add(path)
    with pytest.raises(ConfigError, match="another line"):
        TokenFiles([str(path), str(path)])


@pytest.mark.parametrize("tenant", ["", "a b", "ä", "a" * 129])
def test_a_tenant_has_a_name(tenant: str) -> None:
    with pytest.raises(ConfigError, match="a tenant is"):
        new_token(tenant, Role.TENANT)
