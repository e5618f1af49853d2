"""Train draft models: texts of the target's own, the draft network, the run and its report."""
