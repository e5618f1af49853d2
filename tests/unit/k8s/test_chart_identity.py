"""What parts prove themselves with: their own certificates and Redis users; tokens of clients."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import outrider.cli.status
import outrider.cli.token
from outrider.session.acl import RIGHTS, acl_line, user_name
from outrider.tokens import TokenFiles
from tests.support.chart import (
    FILES,
    SECURE,
    Rendered,
    files_of,
    flags_of,
    keys_of,
    rendered_with,
    values_of,
)

Render = Callable[[str], Rendered]


@pytest.mark.parametrize("name", FILES)
def test_every_file_that_is_named_is_mounted(rendered: Render, name: str) -> None:
    for pod, container, _ in rendered(name).services():
        there = files_of(pod, container)
        words = [*container["args"]]
        for kind in ("startup", "liveness", "readiness"):
            words += container[f"{kind}Probe"].get("exec", {}).get("command", [])
        named = {word.partition("=")[2] for word in words if "=/etc/" in word}
        assert named == set(there)
        # What is mounted by subPath is not updated.
        assert not [mount for mount in container["volumeMounts"] if "subPath" in mount]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("name", SECURE)
def test_every_part_has_its_own_identity_only(rendered: Render, name: str) -> None:
    owners: dict[str, set[str]] = {}
    for pod, container, service in rendered(name).services():
        there = files_of(pod, container)
        secret, _ = there["/etc/outrider/tls/tls.key"]
        assert there["/etc/outrider/tls/tls.crt"] == (secret, "tls.crt")
        owner = f"{service} of {pod['metadata']['labels']['outrider/model']}"
        owners.setdefault(secret, set()).add(owner)
        assert ("/etc/outrider/tokens/tokens" in there) is (
            service == "coordinator" and name != "tls"
        )
        flags = flags_of(container)
        if name != "tls":
            user = re.fullmatch(r"rediss://(.+)@rel-outrider-redis:6379/0", flags["--redis-url"])
            assert user is not None
            changed = {"auth": {user_name("coordinator"): "chat-coordinator"}}.get(name, {})
            assert user[1] == changed.get(user_name(service), user_name(service))
            _, key = there["/etc/outrider/redis/password"]
            assert key.startswith(service)
            # To the Valkey of the chart each part shows its own, too.
            assert flags["--redis-key"] == flags["--tls-key"]
    assert all(len(found) == 1 for found in owners.values()), owners


def test_ranks_prove_themselves_to_nobody() -> None:
    part = {"tlsSecret": "x"}
    verify = values_of("kuberay")["verify"] | part
    redis = {"users": {"secret": "users"}, "trial": part}
    secured = {"tls": {"mode": "secrets"}, "coordinator": part, "draft": part, "redis": redis}
    found = rendered_with("kuberay", verify=verify, **secured)
    cluster = found.of("RayCluster")[0]["spec"]
    head, ranks = cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]
    assert files_of(head, head["spec"]["containers"][0])
    assert files_of(ranks, ranks["spec"]["containers"][0]) == {}
    assert not [
        list(keys_of(volume)) for volume in ranks["spec"]["volumes"] if list(keys_of(volume))
    ]


@pytest.mark.parametrize("name", ["cert-manager", "auth"])
def test_redis_has_the_users_that_log_in(rendered: Render, name: str) -> None:
    found = rendered(name)
    rights = found.named("ConfigMap", "rel-outrider-redis-acl")["data"]
    for part in RIGHTS:
        wanted = acl_line(part)
        if (name, part) == ("auth", "coordinator"):
            wanted = wanted.replace("outrider-coordinator", "chat-coordinator")
        assert rights[part] == wanted
    logging_in = {
        flags_of(container)["--redis-url"].partition("://")[2].partition("@")[0]
        for _, container, _ in found.services()
    }
    assert logging_in <= {line.split()[1] for line in rights.values()}


def test_several_addresses_of_redis_all_get_the_user() -> None:
    redis = {"url": "redis://a:1/0,redis://b:2/0", "users": {"secret": "users"}}
    found = rendered_with("minimal", redis=redis)
    urls = {service: flags_of(c)["--redis-url"] for _, c, service in found.services()}
    assert urls["draft-worker"] == (
        "redis://outrider-draft-worker@a:1/0,redis://outrider-draft-worker@b:2/0"
    )


@pytest.mark.parametrize("name", FILES)
def test_traffic_is_called_what_it_is(rendered: Render, name: str) -> None:
    for service in rendered(name).of("Service"):
        for port in service["spec"]["ports"]:
            if port["name"] == "grpc":
                assert port["appProtocol"] == ("https" if name in SECURE else "kubernetes.io/h2c")


@pytest.mark.parametrize("name", FILES)
def test_commands_in_the_notes_are_ones(
    rendered: Render, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line.strip() for line in rendered(name).notes.splitlines()]
    asked = [shlex.split(line)[2:] for line in lines if line.startswith("outrider status ")]
    assert asked
    for arguments in asked:
        status = outrider.cli.status.command.make_context("status", arguments)
        assert bool(status.params["tls_ca"]) is (name in SECURE)
        assert bool(status.params["tls_cert"]) is (name in ("tls", "cert-manager"))
        assert bool(status.params["token_file"]) is (name in ("auth", "cert-manager"))
    made = [line for line in lines if line.startswith("outrider token create")]
    assert len(made) == (name in ("auth", "cert-manager"))
    for line in made:
        words = shlex.split(line, comments=True)[2:]
        done = CliRunner().invoke(outrider.cli.token.command, words)
        assert done.exit_code == 0, done.output
        holder = TokenFiles([words[-1]]).find(done.stdout.strip())
        assert holder is not None
        # What kubectl makes of the file has the key that pods mount.
        assert f"--from-file={words[-1]} " in rendered(name).notes
