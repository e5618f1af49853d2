"""Telemetry without a collector."""

import json
import logging
import subprocess
import sys
import time

import pytest
from structlog.testing import capture_logs

from outrider._exporters import COMPLAINT_EVERY_S, EXPORTERS, Complaints, listen

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


STUCK = """
import threading
from outrider import _exporters, logs, telemetry

tries, release = [], threading.Event()
send = _exporters.OTLPSpanExporter.export

def stuck(self, spans):
    tries.append(len(spans))
    release.wait()
    return send(self, spans)

_exporters.OTLPSpanExporter.export = stuck
_exporters.EXPORT_TIMEOUT_S = 0.2
logs.configure("info", service="test")
end = telemetry.start("test", instance="i1", otlp_endpoint="http://127.0.0.1:1")
tracer, counter = telemetry.tracer("t"), telemetry.meter("t").create_counter("c")
# More than may wait to be sent.
for _ in range(6000):
    with tracer.start_as_current_span("call"):
        counter.add(1)
print("went on", flush=True)
release.set()
end()
print(len(tries))
"""


def test_case_36_calls_do_not_wait_for_a_collector_and_the_log_is_not_flooded() -> None:
    """The exporter hangs until all calls are over, so none of them can have waited for it."""
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    said, tries = done.stdout.splitlines()
    assert said == "went on"
    # What waited is not tried batch by batch at the end.
    assert int(tries) <= 2
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["event"] == "telemetry is not exported"


LOGGED = """
from outrider import logs, telemetry
logs.configure("info", service="test")
end = telemetry.start("test", instance="i1", otlp_endpoint="http://127.0.0.1:1")
for _ in range(3):
    telemetry.tracer("t").start_span("s").end()
end()
"""


def test_a_collector_that_is_down_is_one_line_of_the_structured_log() -> None:
    command = [sys.executable, "-c", LOGGED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    said = json.loads(line)
    assert said["event"] == "telemetry is not exported"
    assert (said["service"], said["instance"], said["failures"]) == ("test", "i1", 1)
    assert "127.0.0.1:1" in said["error"]


def test_failing_exports_are_told_once_in_a_while() -> None:
    now = 50.0
    complaints = Complaints("test", "i1", clock=lambda: now)
    exporter = logging.getLogger("opentelemetry.exporter.some.exporter")
    stop = listen(complaints)
    with capture_logs() as lines:
        for _ in range(40):
            exporter.warning("no luck with %s", "it")
        now += COMPLAINT_EVERY_S
        exporter.error("still no luck")
        exporter.error("and again")
    stop()
    assert [(line["error"], line["failures"]) for line in lines] == [
        ("no luck with it", 1),
        ("still no luck", 41),
    ]


def test_the_log_of_the_exporters_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    listen(Complaints("test", "i1"))()
    for name in EXPORTERS:
        logging.getLogger(name).warning("%s is heard by everybody", name)
        assert f"{name} is heard by everybody" in caplog.text
