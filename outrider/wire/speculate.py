"""Between verify worker and draft worker."""

from outrider import messages as m
from outrider.errors import InvalidRequestError
from outrider.pb.v1 import draft_pb2, types_pb2
from outrider.wire import shared


def draft_command_to_pb(value: m.DraftCommand) -> draft_pb2.DraftCommand:
    """To the wire."""
    pb = draft_pb2.DraftCommand(session_id=value.session_id, epoch=value.epoch)
    match value:
        case m.OpenDraft():
            pb.open.CopyFrom(
                draft_pb2.OpenDraft(
                    token_ids=value.token_ids,
                    sampling=shared.sampling_to_pb(value.sampling),
                    prompt_len=value.prompt_len,
                    stop_ids=sorted(value.stop_ids),
                    rule=shared.RULES[value.rule],
                    q_top=value.q_top,
                    max_nodes=value.max_nodes,
                    draft_len=value.draft_len,
                    traceparent=value.traceparent,
                    corpus=value.corpus,
                )
            )
        case m.CommitDraft():
            layers = [
                types_pb2.LayerFeatures(layer=layer, hidden_states=shared.tensor_to_pb(tensor))
                for layer, tensor in value.features or ()
            ]
            pb.commit.CopyFrom(
                draft_pb2.CommitDraft(
                    base_len=value.base_len,
                    token_ids=value.token_ids,
                    draft_len=value.draft_len,
                    features=types_pb2.Features(layers=layers) if layers else None,
                    price=_price_to_pb(value.price),
                )
            )
        case m.CloseDraft():
            pb.close.SetInParent()
    return pb


def draft_command_from_pb(pb: draft_pb2.DraftCommand) -> m.DraftCommand:
    """From the wire."""
    match pb.WhichOneof("command"):
        case "open":
            return m.OpenDraft(
                session_id=pb.session_id,
                epoch=pb.epoch,
                token_ids=tuple(pb.open.token_ids),
                sampling=shared.sampling_from_pb(pb.open.sampling),
                prompt_len=pb.open.prompt_len,
                stop_ids=frozenset(pb.open.stop_ids),
                rule=shared.rule_from_pb(pb.open.rule),
                q_top=pb.open.q_top,
                max_nodes=pb.open.max_nodes,
                draft_len=pb.open.draft_len,
                traceparent=pb.open.traceparent,
                corpus=pb.open.corpus,
            )
        case "commit":
            return m.CommitDraft(
                session_id=pb.session_id,
                epoch=pb.epoch,
                base_len=pb.commit.base_len,
                token_ids=tuple(pb.commit.token_ids),
                draft_len=pb.commit.draft_len,
                features=_features_from_pb(pb.commit.features),
                price=m.Price(pb.commit.price.row, pb.commit.price.second),
            )
        case "close":
            return m.CloseDraft(session_id=pb.session_id, epoch=pb.epoch)
        case _:
            raise InvalidRequestError("draft command without a command")


def _price_to_pb(price: m.Price) -> draft_pb2.Price | None:
    return None if price == m.FREE else draft_pb2.Price(row=price.row, second=price.second)


def _features_from_pb(pb: types_pb2.Features) -> tuple[tuple[int, m.Tensor], ...] | None:
    """None where they can't be read: the commit that they come with counts all the same."""
    try:
        return tuple(
            (entry.layer, shared.tensor_from_pb(entry.hidden_states)) for entry in pb.layers
        )
    except InvalidRequestError:
        return None


def draft_event_to_pb(value: m.DraftEvent) -> draft_pb2.DraftEvent:
    """To the wire."""
    pb = draft_pb2.DraftEvent(session_id=value.session_id, epoch=value.epoch)
    match value:
        case m.Proposal():
            pb.proposal.CopyFrom(
                draft_pb2.Proposal(
                    base_len=value.base_len,
                    draft=shared.draft_to_pb(value.draft),
                    timings=shared.timings_to_pb(value.timings),
                    draft_us=value.draft_us,
                    feature_layers=value.feature_layers,
                )
            )
        case m.DraftFailed():
            pb.error.CopyFrom(shared.error_to_pb(value.error))
    return pb


def draft_event_from_pb(pb: draft_pb2.DraftEvent) -> m.DraftEvent:
    """From the wire."""
    match pb.WhichOneof("event"):
        case "proposal":
            return m.Proposal(
                session_id=pb.session_id,
                epoch=pb.epoch,
                base_len=pb.proposal.base_len,
                draft=shared.draft_from_pb(pb.proposal.draft),
                timings=shared.timings_from_pb(pb.proposal.timings),
                draft_us=pb.proposal.draft_us,
                feature_layers=tuple(pb.proposal.feature_layers),
            )
        case "error":
            error = shared.error_from_pb(pb.error)
            return m.DraftFailed(session_id=pb.session_id, epoch=pb.epoch, error=error)
        case _:
            raise InvalidRequestError("draft event without an event")
