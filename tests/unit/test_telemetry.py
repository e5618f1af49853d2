"""Telemetry without a collector."""

import subprocess
import sys
import time

SCRIPT = """
from outrider import telemetry
end = telemetry.start("test", otlp_endpoint="http://127.0.0.1:1")
telemetry.tracer("t").start_span("s").end()
telemetry.meter("t").create_counter("c").add(1)
print("started", flush=True)
end()
"""


def test_case_36_a_collector_that_is_down_does_not_hold_up_the_end() -> None:
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        begun = time.monotonic()
        process.communicate()
    assert process.returncode == 0
    assert time.monotonic() - begun < 7
