"""Every set of values is rendered once."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.chart import Rendered, load_chart, values_of


@pytest.fixture(scope="package")
def rendered() -> Iterator[Callable[[str], Rendered]]:
    """The objects for ci/NAME.yaml."""
    cache: dict[str, Rendered] = {}
    with load_chart() as chart:

        def render(name: str) -> Rendered:
            if name not in cache:
                cache[name] = Rendered(chart, values_of(name))
            return cache[name]

        yield render
