"""Draws a timeline as an HTML file without scripts: a row per request, a column per iteration.

The file needs no network.
"""

from collections.abc import Iterator
from html import escape

from orca_jax.timeline.read import Timeline
from orca_jax.timeline.spans import COLORS, KINDS, Span, request_spans
from orca_jax.timeline.writer import IterationRecord

_ROW = 16  # pixels
_TOP = 96  # height of the strip with the tokens of each iteration
_BAR = 64  # height of its highest bar
_AXIS = 12  # below the bars, for the numbers

_STYLE = f"""
body {{ font: 13px/1.4 system-ui, sans-serif; margin: 16px; color: #222; background: #fff; }}
h1 {{ font-size: 17px; }}
.key span {{ margin-right: 16px; white-space: nowrap; }}
.key i {{ display: inline-block; width: 12px; height: 12px; margin-right: 4px; vertical-align: -1px; }}
.chart {{ display: flex; overflow: auto; max-height: 85vh; border: 1px solid #ccc; margin-top: 12px; }}
.names {{ position: sticky; left: 0; background: #fff; border-right: 1px solid #ccc; flex: none; }}
.names div {{ height: {_ROW}px; font: 11px/{_ROW}px ui-monospace, monospace; padding: 0 8px; white-space: nowrap;
  max-width: 260px; overflow: hidden; text-overflow: ellipsis; }}
.names .top {{ height: {_TOP}px; font: inherit; color: #666; }}
svg {{ flex: none; display: block; }}
svg text {{ font: 10px ui-monospace, monospace; fill: #666; }}
svg rect:hover {{ stroke: #000; stroke-width: 1; }}
"""


def html_page(timeline: Timeline) -> str:
    """Return the text of the file."""
    config = timeline.head.config
    title = (
        f"{config.model}: {config.scheduler}, {len(timeline.arrivals)} requests, {len(timeline.iterations)} iterations"
    )
    spans = request_spans(timeline)
    column = 14 if len(timeline.iterations) <= 200 else 8 if len(timeline.iterations) <= 2000 else 4
    width, height = column * len(timeline.iterations) + 40, _TOP + _ROW * len(spans)
    key = "".join(f'<span><i style="background:{COLORS[kind]}"></i>{escape(KINDS[kind])}</span>' for kind in KINDS)
    names = "".join(_name(timeline, n) for n in spans)
    rows = [
        f'<g data-request="{n}">{"".join(_cell(timeline, n, span, _TOP + _ROW * row, column) for span in each)}</g>'
        for row, (n, each) in enumerate(spans.items())
    ]
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
            f'<div class="key">{key}</div><div class="chart"><div class="names">',
            f'<div class="top">tokens per iteration,<br>then the requests in it</div>{names}</div>',
            f'<svg width="{width}" height="{height}" role="img"><title>requests by iteration</title>',
            *_strip(timeline, column),
            *rows,
            "</svg></div></body></html>\n",
        ]
    )


def _name(timeline: Timeline, n: int) -> str:
    arrival, end = timeline.arrivals[n], timeline.ends.get(n)
    came = f"{arrival.prompt} prompt tokens, at most {arrival.max_tokens} generated"
    went = f"{end.generated} generated, {end.cached} cached, {end.reason}" if end else "no end in the timeline"
    return f'<div title="{escape(f"{came}; {went}")}">{escape(f"{n}: {arrival.request_id}")}</div>'


def _cell(timeline: Timeline, n: int, span: Span, y: int, column: int) -> str:
    first, last = timeline.iterations[span.first].iteration, timeline.iterations[span.last].iteration
    when = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    count = "1 token" if span.tokens == 1 else f"{span.tokens} tokens"
    what = f", {count} from position {span.start}" if span.tokens else ""
    why = f"; the first waiting request lacks {span.held}" if span.held else ""
    wide = column * (span.last - span.first + 1) - 1
    text = escape(f"{timeline.arrivals[n].request_id}, {when}: {KINDS[span.kind]}{what}{why}")
    return _rect(span.first * column, y + 2, wide, _ROW - 4, COLORS[span.kind], text)


def _strip(timeline: Timeline, column: int) -> Iterator[str]:
    """Yield a bar for each iteration: increments below, then repeats, chunks and padding; and some numbers."""
    most = max([each.tokens + each.padding for each in timeline.iterations], default=0) or 1
    floor = _TOP - _AXIS - 6
    for index, each in enumerate(timeline.iterations):
        text = escape(_caption(each))
        parts = {
            COLORS["increment"]: len(each.increments),
            COLORS["repeat"]: sum(size for _, _, size in each.repeats),
            COLORS["chunk"]: sum(size for _, _, size, _ in each.chunks),
            "#eeeeee": each.padding,
        }
        y = float(floor)
        for color, count in parts.items():
            high = _BAR * count / most
            y -= high
            if count:
                yield _rect(index * column, y, column - 1, high, color, text)
        if index % max(1, 70 // column) == 0:
            yield f'<text x="{index * column}" y="{floor + _AXIS}">{each.iteration}</text>'
    yield f'<text x="0" y="10">{most} tokens</text>'


def _caption(each: IterationRecord) -> str:
    queue = f"{each.running} running, {each.waiting} waiting" + (f" for {each.held}" if each.held else "")
    host = each.planned - each.selected + each.update
    return (
        f"iteration {each.iteration}: {each.tokens} tokens, {each.padding} of padding, {each.launches} launches; "
        f"{queue}; {each.free_pages} pages free; device {1e3 * each.device:.2f} ms, host {1e3 * host:.2f} ms"
    )


def _rect(x: float, y: float, width: float, height: float, color: str, text: str) -> str:
    place = f'x="{x}" y="{y:.4g}" width="{width}" height="{height:.4g}"'
    return f'<rect {place} fill="{color}"><title>{text}</title></rect>'
