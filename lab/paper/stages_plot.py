"""Draws the batches on the stages of a pipeline, as in the paper's Figure 8."""

from collections.abc import Mapping, Sequence

from lab.paper.pipeline import Busy
from orca_jax.helpers.reporting import new_figure, save_plot
from orca_jax.timeline.palette import REQUESTS


def plot_stages(path: str, systems: Mapping[str, Sequence[Busy]]) -> None:
    """Draw a panel per system, as in Figure 8: a line for each stage, a box for each batch on it.

    Raises:
        ConfigError: as in `plot_curves`.
    """
    figure = new_figure(8.0, 2.1 * len(systems))
    panels = figure.subplots(len(systems), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (title, boxes) in zip(panels, systems.items(), strict=True):
        for box in boxes:
            color = REQUESTS[min(box.requests) // 2 % len(REQUESTS)]
            width = box.end - box.start
            axes.barh(box.stage, width, left=box.start, height=0.9, color=color, alpha=0.95 if box.is_initiation
                      else 0.55, edgecolor="white", linewidth=0.4)  # fmt: skip
            if box.is_initiation:
                letters = "\n".join(chr(ord("A") + number) for number in box.requests)
                axes.text(
                    box.start + width / 2,
                    box.stage,
                    letters,
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white",
                )
        stages = 1 + max(box.stage for box in boxes)
        axes.set(
            title=title,
            yticks=range(stages),
            yticklabels=[f"stage {each + 1}" for each in range(stages)],
        )
        axes.invert_yaxis()
    panels[-1].set_xlabel(
        "seconds; dark, with the letters of the requests: prefill (initiation); pale: increments"
    )
    save_plot(figure, path)
