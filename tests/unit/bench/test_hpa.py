"""The rules of the horizontal autoscaler and of KEDA, on cases worked out by hand."""

from bench.hpa import Direction, Scaler, Step


def run(scaler: Scaler, values: list[float], current: int, every_s: float = 15.0) -> list[int]:
    seen = []
    for number, value in enumerate(values):
        current = scaler.replicas(number * every_s, current, value)
        seen.append(current)
    return seen


def test_the_value_over_the_target_rounded_up_within_bounds() -> None:
    assert run(Scaler(0.7, 1, 8), [0.0], 3) == [1]
    assert run(Scaler(0.7, 1, 8), [2.2], 1) == [4]
    assert run(Scaler(0.7, 1, 8), [99.0], 1) == [8]
    assert run(Scaler(0.7, 2, 8), [0.0], 5) == [2]


def test_within_the_tolerance_nothing_changes() -> None:
    # 2.30 / 0.7 = 3.29, but 3 replicas are within a tenth of it.
    assert run(Scaler(0.7, 1, 8), [2.30], 3) == [3]
    assert run(Scaler(0.7, 1, 8), [2.32], 3) == [4]


def test_going_down_waits_for_the_highest_of_the_window() -> None:
    scaler = Scaler(1.0, 1, 8, down=Direction(window_s=40))
    # At 45 s what was asked for at 0 s is forgotten; at 60 s what was at 15 s.
    assert run(scaler, [5, 3, 1, 1, 1, 1], 5) == [5, 5, 5, 3, 1, 1]


def test_going_up_waits_for_the_lowest_of_the_window() -> None:
    scaler = Scaler(1.0, 1, 8, up=Direction(window_s=20))
    assert run(scaler, [1, 5, 5, 5], 1) == [1, 1, 5, 5]


def test_steps_limit_how_fast_it_goes() -> None:
    up = Direction(steps=(Step(100, 60, percent=True), Step(2, 60)))
    # The further of +100 % and +2 in a minute.
    assert run(Scaler(1.0, 1, 20, up=up), [20] * 9, 1) == [3, 3, 3, 3, 6, 6, 6, 6, 12]
    down = Direction(steps=(Step(50, 60, percent=True),))
    assert run(Scaler(1.0, 1, 20, down=down), [1] * 9, 8) == [4, 4, 4, 4, 2, 2, 2, 2, 1]


def test_keda_starts_the_first_and_stops_the_last() -> None:
    scaler = Scaler(0.7, 0, 8, cooldown_s=40)
    values = [0, 0.01, 0.01, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert run(scaler, values, 0) == [0, 1, 1, 5, 1, 1, 0, 0]


def test_values_of_the_chart_are_read_and_made_faster() -> None:
    policies = [
        {"type": "Percent", "value": 100, "periodSeconds": 60},
        {"type": "Pods", "value": 2, "periodSeconds": 60},
    ]
    behaviour = {"stabilizationWindowSeconds": 300, "policies": policies}
    assert Direction.of(behaviour, speed=10) == Direction(
        30, (Step(100, 6, percent=True), Step(2, 6))
    )
    assert Direction.of({}) == Direction()
