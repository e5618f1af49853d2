"""The plot of `python -m bench autoscale`: load, demand and draft workers over time."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw(figures: dict[str, Any], path: Path) -> None:
    """Write the plot of one run."""
    samples = figures["samples"]
    at = [sample["at_s"] for sample in samples]

    def line(name: str) -> list[float]:
        return [sample[name] for sample in samples]

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    above.step(at, line("load"), where="post", color="grey", label="sessions at once")
    above.plot(at, line("waiting"), color="tab:red", label="of them waiting for drafts")
    above.set_ylabel("sessions")
    above.legend(loc="upper right")
    target = 0.7
    below.plot(at, [value / target for value in line("demand")], label="demand / target")
    below.step(at, line("replicas"), where="post", label="draft workers started")
    below.step(at, line("ready"), where="post", linestyle=":", label="draft workers ready")
    below.set_ylabel("draft workers")
    below.set_xlabel(f"seconds ({figures['settings']['speed']:g} times as fast as in a cluster)")
    below.legend(loc="upper right")
    figure.suptitle(f"The draft pool under {figures['settings']['rule']}")
    figure.savefig(path, dpi=100)
    plt.close(figure)
