"""Features that can't be what the target computed are dropped; nothing else is."""

import struct

import pytest

from draft_worker.figures import Figures
from draft_worker.malformed import FeatureShape, fault_of
from draft_worker.scheduler import Scheduler
from outrider import wire
from outrider.drafting.ngram import NgramDrafter
from outrider.messages import CommitDraft, OpenDraft, Proposal, SamplingParams, Tensor
from outrider.pb.v1 import types_pb2

TOKENS = (1, 2)
HIDDEN = 3
READ = FeatureShape(frozenset({4, 9}), HIDDEN)
NAN16, INF_BF16 = 0x7E00, 0xFF80


def tensor(*shape: int, number: float = 1.0) -> Tensor:
    size = 1
    for length in shape:
        size *= length
    return Tensor("float32", shape, struct.pack(f"<{size}f", *[number] * size))


def half(dtype: str, last: int) -> Tensor:
    return Tensor(dtype, (2, 3), struct.pack("<6H", *[0x3C00] * 5, last))


def commit(*features: tuple[int, Tensor]) -> CommitDraft:
    return CommitDraft(
        session_id="s", epoch=1, base_len=4, token_ids=TOKENS, draft_len=2, features=features
    )


SOUND = ((4, tensor(2, 3)), (9, half("bfloat16", 0x3F80)))
MALFORMED = {
    "a row too many": (commit((4, tensor(3, 3))), "shape"),
    "no rows": (commit((4, tensor(0, 3))), "shape"),
    "no width": (commit((4, tensor(2, 0))), "shape"),
    "flat": (commit((4, tensor(6))), "shape"),
    "a scalar": (commit((4, tensor())), "shape"),
    "too deep": (commit((4, tensor(2, 1, 3))), "shape"),
    "unlike widths": (commit((4, tensor(2, 3)), (9, tensor(2, 4))), "shape"),
    "a layer twice": (commit((4, tensor(2, 3)), (4, tensor(2, 3))), "twice"),
    "NaN": (commit((4, tensor(2, 3)), (9, tensor(2, 3, number=float("nan")))), "finite"),
    "infinite": (commit((4, tensor(2, 3, number=float("-inf")))), "finite"),
    "NaN in float16": (commit((4, half("float16", NAN16))), "finite"),
    "infinite in bfloat16": (commit((4, half("bfloat16", INF_BF16))), "finite"),
}


def test_sound_features_have_no_fault() -> None:
    assert fault_of(commit()) == fault_of(commit(), READ) == ""
    assert fault_of(commit(*SOUND)) == fault_of(commit(*SOUND), READ) == ""
    assert fault_of(commit((4, half("float16", 0x7BFF)))) == ""  # the largest there is


@pytest.mark.parametrize("name", MALFORMED)
def test_a_fault_is_named(name: str) -> None:
    command, said = MALFORMED[name]
    assert said in fault_of(command)


def test_what_a_drafter_reads_has_its_layers_and_its_width() -> None:
    assert "layers" in fault_of(commit((4, tensor(2, 3))), READ)
    assert "layers" in fault_of(commit(*SOUND, (5, tensor(2, 3))), READ)
    assert "shape" in fault_of(commit((4, tensor(2, 4)), (9, tensor(2, 4))), READ)


def test_malformed_features_cost_only_themselves() -> None:
    figures = Figures()
    scheduler = Scheduler(NgramDrafter(), figures, max_sessions=2)
    prompt = (1, 2, 1, 2)
    for session_id in ("s", "other"):
        opened = OpenDraft(
            session_id=session_id, epoch=1, token_ids=prompt, sampling=SamplingParams()
        )
        assert scheduler.apply(0, opened) == []
    scheduler.answer()
    pb = wire.draft_command_to_pb(commit(*SOUND))
    pb.commit.features.layers[0].hidden_states.data += b"x"
    unreadable = wire.draft_command_from_pb(pb)
    assert scheduler.apply(0, unreadable) == []
    assert figures.malformed_features == 1
    [(_, proposal)] = scheduler.answer()
    assert isinstance(proposal, Proposal)
    assert (proposal.session_id, proposal.base_len) == ("s", 6)
    sound = CommitDraft(
        session_id="s", epoch=1, base_len=6, token_ids=TOKENS, draft_len=2, features=SOUND
    )
    assert scheduler.apply(0, sound) == []
    assert figures.malformed_features == 1
    assert figures.sessions == 2


@pytest.mark.parametrize("dtype", [types_pb2.TENSOR_DTYPE_UNSPECIFIED, 77])
def test_features_of_no_known_type_leave_the_commit(dtype: types_pb2.TensorDtype.ValueType) -> None:
    pb = wire.draft_command_to_pb(commit(*SOUND))
    pb.commit.features.layers[1].hidden_states.dtype = dtype
    command = wire.draft_command_from_pb(pb)
    assert isinstance(command, CommitDraft)
    assert command.features is None
    assert command.token_ids == TOKENS
    assert fault_of(command)
