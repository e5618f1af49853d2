"""Names of sessions, and of what Redis keeps of them."""

# Written to find out whether Redis takes writes.
PROBE_KEY = "outrider:probe"


def sample_id(session_id: str, index: int) -> str:
    """The session of sample `index` of the request `session_id`: `<id>`, `<id>.1`, `<id>.2`, …"""
    return f"{session_id}.{index}" if index else session_id


def session_keys(session_id: str) -> tuple[str, str, str, str]:
    """The keys of a session: record, token log, log-probabilities, lease.

    They carry one hash tag, so that a script on them touches one slot.
    """
    tag = f"outrider:{{{session_id}}}"
    return f"{tag}:session", f"{tag}:tokens", f"{tag}:logprobs", f"{tag}:lease"
