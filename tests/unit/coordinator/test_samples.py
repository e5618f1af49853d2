"""The calls that a request for several samples becomes."""

from coordinator.commit import Limits
from coordinator.requests import GenerateCall
from coordinator.samples import calls_of
from outrider.messages import SamplingParams, SpeculationOptions
from outrider.sampling.seeds import derived_seed

CALL = GenerateCall(
    session_id="s",
    prompt=(1, 2),
    limits=Limits(2, 8, 64),
    sampling=SamplingParams(0.5, seed=7),
    stop=("x",),
    stop_ids=(3,),
    speculation=SpeculationOptions(),
    samples=3,
)


def test_ids_and_seeds_differ_and_nothing_else() -> None:
    calls = calls_of(CALL)
    assert [call.session_id for call in calls] == ["s", "s.1", "s.2"]
    assert [call.sampling.seed for call in calls] == [7, derived_seed(7, 1), derived_seed(7, 2)]
    assert {(call.prompt, call.limits, call.stop) for call in calls} == {
        (CALL.prompt, CALL.limits, CALL.stop)
    }
    # Whoever takes the request over finds the others through the first.
    assert [call.samples for call in calls] == [3, 1, 1]
    assert {call.sampling.temperature for call in calls} == {0.5}
