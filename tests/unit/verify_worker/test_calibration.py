"""The steps that are timed at start."""

from outrider.model.blocks import BlockPool
from verify_worker.calibration import BUDGET_S, STATED_ROWS, calibrate, step_times_ms
from verify_worker.cost import CostModel, StepShape
from verify_worker.state import Outcome, Plan


class Machine:
    """Steps that take what a formula says, on a clock that only they move."""

    def __init__(self, row_s: float) -> None:
        self.now_s = 100.0
        self.shapes: list[StepShape] = []
        self._row_s = row_s

    def clock(self) -> float:
        return self.now_s

    def run(self, plan: Plan) -> Outcome:
        shape = plan.shape
        for work in plan.work:
            needed = -(-(work.start + work.rows) // 16)
            assert len(work.session.table.blocks) == needed
            assert len(work.token_ids) == work.rows
        self.shapes.append(shape)
        seconds = 0.01 + self._row_s * shape.rows + 1e-6 * shape.context
        self.now_s += seconds
        return Outcome((None,) * len(plan.work), seconds)


def calibrated(machine: Machine, blocks: int = 200, context_len: int = 4096) -> CostModel:
    pool, cost = BlockPool(blocks), CostModel()
    calibrate(machine, pool, cost, context_len, machine.clock)
    assert pool.free == blocks
    return cost


def test_a_fast_machine_is_known_before_the_first_session() -> None:
    machine = Machine(row_s=0.0005)
    cost = calibrated(machine)
    for rows in STATED_ROWS:
        assert abs(cost.seconds(StepShape.of(rows)) / (0.01 + 0.0005 * rows) - 1) < 0.1
    assert {shape.sessions for shape in machine.shapes} == {1, 8}
    assert max(shape.context for shape in machine.shapes) > 1000
    assert list(step_times_ms(cost)) == [f"rows_{rows}" for rows in STATED_ROWS]


def test_a_slow_machine_is_not_kept_waiting() -> None:
    machine = Machine(row_s=0.2)
    cost = calibrated(machine)
    assert cost.measured
    # What is thought to fit may take a little longer than was thought.
    assert machine.now_s - 100.0 < 1.5 * BUDGET_S


def test_what_has_no_room_is_left_out() -> None:
    machine = Machine(row_s=0.0005)
    assert calibrated(machine, blocks=1).measured
    assert max(shape.rows for shape in machine.shapes) == 16
    short = Machine(row_s=0.0005)
    calibrated(short, context_len=64)
    assert max(shape.context for shape in short.shapes) == 64
