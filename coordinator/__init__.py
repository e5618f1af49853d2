"""The coordinator: client sessions, the token log, placement and stop conditions."""
