"""Which coordinator is asked first, and what a name stands for."""

import pytest

from outrider._directory import AVOID_S, RESOLVE_AGAIN_S, Directory
from outrider.errors import ConfigError, UnavailableError


class World:
    """A directory on a clock that stands still; shuffling turns a list round."""

    def __init__(self, *addresses: str) -> None:
        self.now = 100.0
        self.directory = Directory(
            addresses, clock=lambda: self.now, shuffle=lambda found: found.reverse()
        )

    def fail(self, endpoint: str) -> None:
        self.directory.failed(endpoint)
        self.now += 0.01


def test_the_first_one_named_is_asked_until_it_fails() -> None:
    world = World("10.0.0.1:1", "10.0.0.2:1", "[::1]:1")
    directory = world.directory
    assert directory.endpoints() == ["10.0.0.1:1", "10.0.0.2:1", "[::1]:1"]
    assert directory.to_resolve() == []
    world.fail("10.0.0.1:1")
    assert directory.endpoints() == ["10.0.0.2:1", "[::1]:1", "10.0.0.1:1"]
    world.fail("10.0.0.2:1")
    world.fail("[::1]:1")
    # All have failed: whose failure is the longest ago comes first.
    assert directory.endpoints() == ["10.0.0.1:1", "10.0.0.2:1", "[::1]:1"]
    world.fail("10.0.0.1:1")
    assert directory.endpoints() == ["10.0.0.2:1", "[::1]:1", "10.0.0.1:1"]
    directory.worked("10.0.0.1:1")
    assert directory.endpoints()[0] == "10.0.0.1:1"


def test_a_failure_is_forgotten_after_a_while() -> None:
    world = World("10.0.0.1:1", "10.0.0.2:1")
    world.fail("10.0.0.1:1")
    world.now += AVOID_S
    assert world.directory.endpoints() == ["10.0.0.1:1", "10.0.0.2:1"]


def test_a_name_stands_for_all_its_addresses_in_random_order() -> None:
    world = World("10.0.0.9:1", "coordinators:7070")
    directory = world.directory
    assert directory.to_resolve() == [("coordinators:7070", "coordinators", 7070)]
    directory.learn("coordinators:7070", ["10.0.0.1", "10.0.0.2", "10.0.0.1", "fd00::3"])
    assert directory.endpoints() == [
        "10.0.0.9:1", "[fd00::3]:7070", "10.0.0.2:7070", "10.0.0.1:7070",
    ]  # fmt: skip
    assert directory.to_resolve() == []


def test_a_name_is_looked_up_again_after_a_failure_but_not_at_once() -> None:
    world = World("coordinators:7070")
    directory = world.directory
    directory.learn("coordinators:7070", ["10.0.0.1"])
    world.now += 1000
    assert directory.to_resolve() == []
    directory.learn("coordinators:7070", ["10.0.0.1"])
    world.fail("10.0.0.1:7070")
    assert directory.to_resolve() == []
    world.now += RESOLVE_AGAIN_S
    assert directory.to_resolve() != []
    # A name that stands for nothing now may be a resolver that is away.
    directory.learn("coordinators:7070", [])
    assert directory.endpoints() == ["10.0.0.1:7070"]
    directory.learn("coordinators:7070", ["10.0.0.2"])
    assert directory.endpoints() == ["10.0.0.2:7070"]


def test_names_without_any_address_say_why() -> None:
    directory = Directory(["one:1", "two:2"])
    directory.learn("one:1", [], "no such name")
    directory.learn("two:2", [], "no resolver")
    assert directory.endpoints() == []
    with pytest.raises(UnavailableError, match="one:1: no such name; two:2: no resolver"):
        directory.first()


@pytest.mark.parametrize("addresses", ["localhost", ["10.0.0.1:1", "here"], "", []])
def test_addresses_that_can_not_be_any_are_refused(addresses: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="address"):
        Directory(addresses)
