"""Names of sessions."""


def sample_id(session_id: str, index: int) -> str:
    """The session of sample `index` of the request `session_id`: `<id>`, `<id>.1`, `<id>.2`, …"""
    return f"{session_id}.{index}" if index else session_id
