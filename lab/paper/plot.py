"""Draws the figures of the paper, with digitised points behind them when given."""

from collections.abc import Mapping, Sequence

from lab.paper.curves import Point
from orca_jax.helpers.reporting import new_figure, save_plot, use_plain_numbers
from orca_jax.timeline.palette import curve_styles

Curves = Mapping[str, Mapping[str, Sequence[Point]]]


def plot_curves(
    path: str,
    title: str,
    curves: Curves,
    digitised: Curves,
    limits: tuple[float, float] | None = (25, 2500),
    latency: str = "median normalised latency, ms/token",
) -> None:
    """Draw a panel per model or workload: the latency over the throughput, as in Figures 10 and 11.

    `limits` are those of the latency; None: they follow from the points. `latency` is the text of its axis.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written; `param` is "plot".
    """
    is_single = len(curves) == 1
    figure = new_figure(6.0 if is_single else 2.7 * len(curves), 4.2 if is_single else 3.7)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (panel, systems) in zip(panels, curves.items(), strict=True):
        for name, style in curve_styles(systems).items():
            points = systems[name]
            known = digitised.get(panel, {}).get(name, [])
            if known:
                axes.scatter(
                    *zip(*known, strict=True), s=28, c=style.color, alpha=0.35, linewidths=0
                )
            axes.plot(*zip(*points, strict=True), style.dashes, color=style.color, marker=style.marker, markersize=3.5,
                      linewidth=1.2, label=name)  # fmt: skip
        axes.set(
            title="" if is_single else panel,
            xlabel="throughput, requests/s",
            yscale="log",
            ylim=limits,
        )
        use_plain_numbers(axes.yaxis)
        axes.set_xlim(left=0)
        axes.grid(visible=True, which="both", alpha=0.25)
    panels[0].set_ylabel(latency)
    figure.suptitle(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_plot(figure, path)


def plot_batches(
    path: str,
    sizes: Sequence[int],
    figures: Mapping[str, Mapping[str, Sequence[float | None]]],
    title: str = "Figure ",
) -> None:
    """Draw a panel per model or workload, named after `title`: the time of a batch over its size, as in Figure 9.

    Raises:
        ConfigError: as in `plot_curves`.
    """
    figure = new_figure(2.7 * max(2, len(figures)), 3.5)
    panels = figure.subplots(1, len(figures), squeeze=False)[0]
    for axes, (name, engines) in zip(panels, figures.items(), strict=True):
        for label, style in curve_styles(engines).items():
            known = [
                (size, each)
                for size, each in zip(sizes, engines[label], strict=True)
                if each is not None
            ]
            axes.plot(*zip(*known, strict=True), style.dashes, color=style.color, marker=style.marker, markersize=4,
                      linewidth=1.2, label=label)  # fmt: skip
        axes.set(
            title=f"{title}{name}",
            xlabel="batch size",
            xscale="log",
            xticks=sizes,
            xticklabels=sizes,
        )
        axes.set_ylim(bottom=0)
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.25)
        if len({tuple(engines) for engines in figures.values()}) > 1:
            axes.legend()
    panels[0].set_ylabel("time of a batch, ms")
    if len({tuple(engines) for engines in figures.values()}) == 1:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_plot(figure, path)
