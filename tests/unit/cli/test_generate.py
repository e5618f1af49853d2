"""`outrider generate` against a scripted coordinator."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider.cli import main
from outrider.errors import OverloadedError
from outrider.pb.v1 import types_pb2
from outrider.sampling.seeds import derived_seed
from tests.support.fake_coordinator import (
    PLAIN,
    SCRIPT,
    TWO,
    FakeCoordinator,
    delta,
    finished,
    logprobs,
    serving_in_thread,
    started,
)


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with serving_in_thread(SCRIPT) as coordinator:
        yield coordinator


def generate(fake: FakeCoordinator, *arguments: str, **options: Any) -> Result:
    command = ["generate", "--coordinator", fake.address, *arguments]
    return CliRunner().invoke(main, command, **options)


def test_text_on_stdout_and_figures_on_stderr(fake: FakeCoordinator) -> None:
    result = generate(fake, "Hi")
    assert result.exit_code == 0
    assert result.stdout == "Hello w!\n"
    assert "4 tokens in 1.50 s, 2.7 tokens/s" in result.stderr
    assert "acceptance rate 25% (1 of 4), mean acceptance length 1.33" in result.stderr


def test_colours_tell_the_origins(fake: FakeCoordinator) -> None:
    result = generate(fake, "Hi", color=True)
    assert result.stdout == "Hel\x1b[32mlo\x1b[0m\x1b[34m\x1b[1m w\x1b[0m!\n"
    plain = generate(fake, "Hi", "--no-color", color=True)
    assert plain.stdout == "Hello w!\n"


def test_json_is_one_object(fake: FakeCoordinator) -> None:
    result = generate(fake, "Hi", "--json", "--seed", "7")
    found = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert found.pop("session_id") == fake.requests[0].session_id
    assert found == {
        "text": "Hello w!",
        "token_ids": [5, 6, 7, 8],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 2},
        "speculation": {
            "rounds": 3,
            "drafts": 2,
            "draft_tokens": 4,
            "accepted_tokens": 1,
            "accepted_per_position": [],
            "acceptance_rate": 0.25,
            "mean_acceptance_length": 1 + 1 / 3,
        },
        "timings": {"first_token_s": 0.25, "total_s": 1.5},
        "model": "fake",
        "seed": 7,
    }


def test_flags_reach_the_request(fake: FakeCoordinator) -> None:
    flags = "--max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 4 --seed 3 --k fixed:2"
    assert generate(fake, "Hi", *flags.split(), "--stop", "a", "--stop", "b").exit_code == 0
    request = fake.requests[0]
    assert request.text == "Hi"
    assert (request.max_tokens, request.temperature, request.top_p) == (9, 0.5, 0.9)
    assert (request.top_k, request.seed, list(request.stop)) == (4, 3, ["a", "b"])
    assert request.speculation.mode == types_pb2.SPECULATION_MODE_ON
    assert request.speculation.draft_len == 2
    assert generate(fake, "Hi", "--speculation", "off").exit_code == 0
    assert fake.requests[1].speculation.mode == types_pb2.SPECULATION_MODE_OFF
    # Not given, it is another one each time.
    assert generate(fake, "Hi").exit_code == 0
    assert len({request.seed for request in fake.requests}) == 3


def test_the_whole_sampling_surface_reaches_the_request(fake: FakeCoordinator) -> None:
    flags = (
        "--min-p 0.1 --repetition-penalty 1.5 --frequency-penalty -0.5 --presence-penalty 0.25 "
        "--logit-bias 5:-100 --logit-bias 6:0.5 --bad-word no --bad-word never --min-tokens 3 "
        "--ignore-eos --include-stop --echo --rule rejection --json --logprobs 2 "
        "--logprobs-kind processed"
    )
    assert generate(fake, "Hi", *flags.split()).exit_code == 0
    request = fake.requests[0]
    assert (request.min_p, request.repetition_penalty) == (0.1, 1.5)
    assert (request.frequency_penalty, request.presence_penalty) == (-0.5, 0.25)
    assert {entry.token_id: entry.bias for entry in request.logit_bias} == {5: -100, 6: 0.5}
    assert (list(request.bad_words), request.min_tokens) == (["no", "never"], 3)
    assert (request.ignore_eos, request.include_stop, request.echo) == (True, True, True)
    assert request.logprobs == types_pb2.LogprobOptions(top=2, processed=True)
    assert request.speculation == types_pb2.SpeculationOptions(
        rule=types_pb2.ACCEPTANCE_RULE_REJECTION
    )


def test_speculation_is_left_to_the_policy_unless_it_is_given(fake: FakeCoordinator) -> None:
    assert generate(fake, "Hi").exit_code == 0
    assert not fake.requests[0].HasField("speculation")
    assert generate(fake, "Hi", "--speculation", "on").exit_code == 0
    assert fake.requests[1].speculation.mode == types_pb2.SPECULATION_MODE_ON


WITH_LOGPROBS = [
    started(prompt_text="Hi", prompt_token_ids=[1, 2]),
    delta(0, (5, "a", PLAIN), logprobs=[logprobs(-0.5, (5, -0.5), (6, -1.5))]),
    finished(1),
]


def test_echo_is_shown_before_the_text(fake: FakeCoordinator) -> None:
    fake.script = WITH_LOGPROBS
    assert generate(fake, "Hi", "--echo").stdout == "Hia\n"
    fake.script = [WITH_LOGPROBS[0], finished(0)]
    assert generate(fake, "Hi", "--echo").stdout == "Hi\n"


def test_json_has_logprobs_and_the_prompt(fake: FakeCoordinator) -> None:
    fake.script = WITH_LOGPROBS
    found = json.loads(generate(fake, "Hi", "--json", "--echo", "--logprobs", "2").stdout)
    assert (found["prompt_text"], found["prompt_token_ids"]) == ("Hi", [1, 2])
    assert found["logprobs"] == [
        {
            "logprob": -0.5,
            "top": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.5}],
        }
    ]


def test_json_of_several_completions(fake: FakeCoordinator) -> None:
    fake.script = TWO
    found = json.loads(generate(fake, "Hi", "--json", "--n", "2").stdout)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert [choice["text"] for choice in found["choices"]] == ["ab!", "ABC"]
    assert [choice["seed"] for choice in found["choices"]] == [7, derived_seed(7, 1)]
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 2}
    assert found["seed"] == 7
    assert fake.requests[0].n == 2


def test_several_completions_one_after_the_other(fake: FakeCoordinator) -> None:
    fake.script = TWO
    result = generate(fake, "Hi", "--n", "2")
    assert result.stdout == "--- 0\nab!\n--- 1\nABC\n"
    assert result.stderr.count("tokens in 1.50 s") == 2
    coloured = generate(fake, "Hi", "--n", "2", color=True)
    assert "A\x1b[32mB\x1b[0mC\n" in coloured.stdout
    assert "!\n" in coloured.stdout


def test_chat_sends_a_message(fake: FakeCoordinator) -> None:
    assert generate(fake, "--chat", "Hi").exit_code == 0
    (message,) = fake.requests[0].messages.messages
    assert (message.role, message.content) == ("user", "Hi")


def test_expected_errors_are_one_line(fake: FakeCoordinator) -> None:
    fake.script = [started(), OverloadedError("full; try again later")]
    result = generate(fake, "Hi")
    assert result.exit_code == 1
    assert result.stderr == "outrider: full; try again later\n"


def test_nothing_listening() -> None:
    result = CliRunner().invoke(main, ["generate", "--coordinator", "127.0.0.1:1", "Hi"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "127.0.0.1:1" in result.stderr
    assert "outrider up" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "PROMPT"),
        (["Hi", "--max-tokens", "0"], "--max-tokens"),
        (["Hi", "--temperature", "-1"], "--temperature"),
        (["Hi", "--speculation", "maybe"], "--speculation"),
        (["Hi", "--speculation", "off", "--k", "fixed:2"], "--k"),
        (["Hi", "--k", "2"], "fixed:N"),
        (["Hi", "--bogus"], "--bogus"),
        (["Hi", "--logit-bias", "5"], "ID:BIAS"),
        (["Hi", "--logit-bias", "a:1"], "ID:BIAS"),
        (["Hi", "--rule", "magic"], "--rule"),
        (["Hi", "--n", "0"], "--n"),
        (["Hi", "--logprobs", "2"], "--json"),
        (["Hi", "--min-p", "2"], "--min-p"),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(main, ["generate", *arguments])
    assert result.exit_code == 2
    assert named in result.stderr
