"""The whole system on one machine: its processes, their commands and their ports."""
