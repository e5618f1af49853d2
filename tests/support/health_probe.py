"""grpc_health_probe as far as the chart uses it: its flags, its checks of them, its exit status.

The images have the real one, which is written in Go and is not at hand where tests run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

BAD_ARGUMENTS, NO_CONNECTION, NO_ANSWER, UNHEALTHY = 1, 2, 3, 4


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(command: Sequence[str]) -> argparse.Namespace:
    """The settings of a probe; a ValueError for what the real one refuses."""
    name, *arguments = command
    parser = _Parser(prog=name, add_help=False, allow_abbrev=False)
    parser.add_argument("-addr", required=True)
    parser.add_argument("-service", default="")
    for limit in ("-connect-timeout", "-rpc-timeout"):
        parser.add_argument(limit, type=_seconds, default=1.0)
    parser.add_argument("-tls", action="store_true")
    for text in ("-tls-ca-cert", "-tls-client-cert", "-tls-client-key", "-tls-server-name"):
        parser.add_argument(text, default="")
    found = parser.parse_args(arguments)
    if name != "grpc_health_probe":
        raise ValueError(f"another program: {name}")
    if not found.tls and (found.tls_ca_cert or found.tls_client_cert or found.tls_server_name):
        raise ValueError("-tls-… without -tls")
    if bool(found.tls_client_cert) is not bool(found.tls_client_key):
        raise ValueError("-tls-client-cert and -tls-client-key go together")
    return found


def _seconds(text: str) -> float:
    if not text.endswith("s") or float(text[:-1]) <= 0:
        raise ValueError(f"no duration: {text}")
    return float(text[:-1])


async def ask(command: Sequence[str]) -> int:
    """The exit status with which the probe would end: 0 where the health service says SERVING."""
    try:
        probe = parse(command)
    except ValueError:
        return BAD_ARGUMENTS
    async with _channel(probe) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=probe.service),
                timeout=probe.connect_timeout + probe.rpc_timeout,
            )
        except grpc.aio.AioRpcError as error:
            unreached = error.code() is grpc.StatusCode.UNAVAILABLE
            return NO_CONNECTION if unreached else NO_ANSWER
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else UNHEALTHY


def _channel(probe: argparse.Namespace) -> grpc.aio.Channel:
    if not probe.tls:
        return grpc.aio.insecure_channel(probe.addr)
    ca, key, cert = (
        Path(path).read_bytes() if path else None
        for path in (probe.tls_ca_cert, probe.tls_client_key, probe.tls_client_cert)
    )
    options = [("grpc.ssl_target_name_override", probe.tls_server_name)]
    return grpc.aio.secure_channel(
        probe.addr,
        grpc.ssl_channel_credentials(ca, key, cert),
        options=options if probe.tls_server_name else [],
    )
