"""Pages as Prometheus reads them, and the rate that it would give."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from bench.scrape import Rate, read_counters

PAGE = b"""# HELP a_total What it is.
# TYPE a_total counter
a_total{worker="1",other="x 5"} 2.0
a_total{worker="2"} 3.5
a_total_other 9.0
b 1e+03
"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


async def test_a_counter_is_summed_over_its_labels(port: int) -> None:
    found = await read_counters(port, ("a_total", "b", "none"))
    assert found == {"a_total": 5.5, "b": 1000.0, "none": 0.0}


def test_the_rate_is_that_of_the_window() -> None:
    rate = Rate(window_s=10)
    assert rate.add(0, 5) == 0
    assert rate.add(5, 10) == pytest.approx(1)
    assert rate.add(10, 10) == pytest.approx(0.5)
    # What was before the window counts no more.
    assert rate.add(15, 10) == 0
