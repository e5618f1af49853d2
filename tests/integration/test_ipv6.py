"""A whole system whose parts reach each other by IPv6 addresses, and listen by several ways."""

import asyncio
import socket
import urllib.request
from pathlib import Path

import pytest

from bench.load import LETTERS
from bench.tiny import write_model
from outrider.local.commands import StackSettings
from outrider.local.ports import take_port
from outrider.local.stack import LocalStack


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


def _page(host: str, port: int) -> str:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


async def test_all_parts_by_ipv6(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", letters=LETTERS)
    metrics_port = take_port("::1", 0)
    settings = StackSettings(
        model=str(model),
        threads=1,
        k="fixed:4",
        host="::1",
        # All addresses, of which one is told; a single one in brackets, which is told as it is.
        verify_flags=("--host=::", "--advertise-host=::1", f"--metrics-port={metrics_port}"),
        draft_flags=("--host", "[::1]"),
    )
    async with LocalStack(settings) as stack:
        assert stack.address.startswith("[::1]:")
        async with stack.client() as client:
            async with asyncio.timeout(60):
                accepted = 0
                while not accepted:  # a draft may come too late for the steps of a tiny model
                    completion = await client.generate("abcabcabc", max_tokens=200).complete()
                    assert len(completion.token_ids) == 200
                    accepted = completion.speculation.accepted_tokens
            status = await client.status()
        addresses = {worker.worker_id: worker.address for worker in status.workers}
        assert {name: found.rpartition(":")[0] for name, found in addresses.items()} == {
            "verify-1": "[::1]",
            "draft-1": "[::1]",
        }
        # `::` is every address of IPv4 as well.
        port = int(addresses["verify-1"].rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        for host in ("[::1]", "127.0.0.1"):
            assert "outrider_" in await asyncio.to_thread(_page, host, metrics_port)
