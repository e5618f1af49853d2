"""Names of sessions, and of what Redis keeps of them."""

import re

# Written to find out whether Redis takes writes.
PROBE_KEY = "outrider:probe"

_SAMPLE_ID = re.compile(r".*\.[0-9]+", re.DOTALL)


def sample_id(session_id: str, index: int) -> str:
    """The session of sample `index` of the request `session_id`: `<id>`, `<id>.1`, `<id>.2`, …"""
    return f"{session_id}.{index}" if index else session_id


def may_be_sample_id(session_id: str) -> bool:
    """Whether a session of that name may be a sample of another one's request.

    No request has such an id, so that whoever has a request has its samples too.
    """
    return _SAMPLE_ID.fullmatch(session_id) is not None


def session_keys(session_id: str) -> tuple[str, str, str, str]:
    """The keys of a session: record, token log, log-probabilities, lease.

    They carry one hash tag, so that a script on them touches one slot.
    """
    tag = f"outrider:{{{session_id}}}"
    return f"{tag}:session", f"{tag}:tokens", f"{tag}:logprobs", f"{tag}:lease"
