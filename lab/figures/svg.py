"""Shapes of SVG, with colours that follow the theme of the reader's system."""

from collections.abc import Mapping, Sequence
from html import escape

from orca_jax.timeline.palette import DARK, LIGHT

COLORS = {
    "page": "card", "line": "idle", "text": "text", "muted": "muted", "soft": "hover", "ink": "on-accent",
    "A": "r0", "B": "r1", "C": "r2", "D": "r3",
}  # fmt: skip
"""Names of a drawing's colours in the palette."""
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"


def _rules(palette: Mapping[str, str]) -> str:
    colors = {name: palette[source] for name, source in COLORS.items()}
    return "".join(
        f".f-{name}{{fill:{color}}}.s-{name}{{stroke:{color}}}" for name, color in colors.items()
    )


class Drawing:
    """A picture that grows shape by shape.

    Args:
        width: in pixels; pages show at most about 740 of them.
        height: in pixels.
        title: the picture in one sentence, for readers without it.
        command: the command that made it.
    """

    def __init__(self, width: float, height: float, title: str, command: str) -> None:
        style = f"text{{font-family:{_FONT}}}{_rules(LIGHT)}@media (prefers-color-scheme: dark){{{_rules(DARK)}}}"
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img">',
            f"<title>{escape(title)}</title><desc>Made by: {escape(command)}</desc><style>{style}</style>",
        ]
        self.box(0, 0, width, height, "page", radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        radius: float = 3,
        edge: str | None = None,
    ) -> None:
        """Add a rectangle."""
        stroke = f' s-{edge}" stroke-width="1.5' if edge else ""
        at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self._parts.append(f'<rect {at} class="f-{fill}{stroke}"/>')

    def text(
        self, x: float, y: float, text: str, *, size: int = 16, color: str = "text", anchor: str = "start",
        is_bold: bool = False,
    ) -> None:  # fmt: skip
        """Add a line of text; `y` is its base."""
        weight = ' font-weight="700"' if is_bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" class="f-{color}"{weight}>'
            f"{escape(text)}</text>"
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: str = "line",
        width: float = 2,
        dashes: str | None = None,
    ) -> None:
        """Add a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        look = f'class="s-{color}" style="fill:none" stroke-width="{width:g}"'
        look += f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(f'<polyline points="{path}" {look}/>')

    def shape(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        """Add a polygon."""
        self._parts.append(
            f'<polygon points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" class="f-{fill}"/>'
        )

    def diamond(self, x: float, y: float, radius: float = 8, fill: str = "text") -> None:
        """Add a diamond around a point."""
        self.shape([(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)], fill)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, color: str = "muted"
    ) -> None:
        """Add a horizontal or vertical arrow."""
        (x, y), (to_x, to_y) = start, end
        sign_x = (to_x > x) - (to_x < x)
        sign_y = (to_y > y) - (to_y < y)
        back_x = to_x - 9 * sign_x
        back_y = to_y - 9 * sign_y
        self.line([start, (back_x, back_y)], color=color)
        self.shape(
            [
                end,
                (back_x + 5 * sign_y, back_y + 5 * sign_x),
                (back_x - 5 * sign_y, back_y - 5 * sign_x),
            ],
            color,
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"
