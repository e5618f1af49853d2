"""`outrider token create`."""

from pathlib import Path

from click.testing import CliRunner

from outrider.cli import main
from outrider.tokens import Role, TokenFiles


def test_a_token_is_printed_once_and_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    runner = CliRunner()
    create = ["token", "create", "--tokens", str(path), "--tenant"]
    for tenant, flags, role in (("acme", [], Role.TENANT), ("ops", ["--admin"], Role.ADMIN)):
        done = runner.invoke(main, [*create, tenant, *flags])
        assert done.exit_code == 0
        token = done.stdout.strip()
        assert token not in path.read_text()
        holder = TokenFiles([str(path)]).find(token)
        assert holder is not None
        assert (holder.tenant, holder.role) == (tenant, role)
    refused = runner.invoke(main, [*create, "a b"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "a tenant is" in refused.stderr
    # What is for everybody's calls in the environment makes nobody a token.
    env = {"OUTRIDER_TENANT": "acme", "OUTRIDER_TOKENS": str(path)}
    assert runner.invoke(main, ["token", "create"], env=env).exit_code == 2
    elsewhere = runner.invoke(main, ["token", "create", "--tokens", "/proc/x", "--tenant", "a"])
    assert "can't write the tokens file /proc/x" in elsewhere.stderr
