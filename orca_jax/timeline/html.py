"""Makes one HTML file of a timeline: figures, a chart of requests by iteration, and a table of requests.

The chart is drawn by the code of the playground's live view, which is in `page/`. The file needs no network and opens
from a disk: style, script and data are in it. Its policy (CSP) lets no other script run, and loads nothing. Figures and
table are plain HTML, so that a reader without scripts has them too.
"""

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from string import Template

from orca_jax.helpers.reporting import p99_name
from orca_jax.timeline.measure import Timeline, figures, token_times
from orca_jax.timeline.page_data import page_json
from orca_jax.timeline.palette import PAGE_FOLDER, SCHEDULERS, palette_css

STYLES = ("chart.css", "recording.css")
MODULES = ("draw.js", "scale.js", "words.js", "chart.js", "recording.js")
"""In an order in which each imports from earlier ones only."""
MAX_ROWS = 1000
"""Rows of the table."""
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(async )?(function|class|const)\b)", re.MULTILINE)


def html_page(timeline: Timeline, other: Timeline | None = None) -> str:
    """Return the text of the file, with another timeline beside it. Raises ConfigError if no request has ended."""
    style = _style()
    script = bundled_script()
    config = timeline.head.config
    names = [_name(each) for each in (timeline, other) if each is not None]
    runs = [_run(timeline, "")] if other is None else [_run(timeline, ""), _run(other, "2")]
    return _template("recording.html").substitute(
        policy=_policy(style, script),
        title=escape(f"{config.model}: {' beside '.join(names)}"),
        layout="" if other is None else "pair",
        runs="".join(runs),
        style=style,
        script=script,
    )


def _run(timeline: Timeline, mark: str) -> str:
    """The part of the page for one timeline; `mark` ends its ids."""
    shown = figures(timeline)
    times = token_times(timeline)
    name = _name(timeline)
    title = f"{SCHEDULERS[name].title} ({name})" if name in SCHEDULERS else name
    counts = f"{len(timeline.arrivals):,} requests, {len(timeline.iterations):,} iterations, {shown['wall_s']:.2f} s"
    return _template("run.html").substitute(
        mark=mark,
        model=escape(timeline.head.config.model),
        scheduler=escape(name),
        description=escape(f"{title}: {counts}"),
        figures="".join(_figures(shown)),
        rows="".join(_rows(timeline, times)),
        hidden_rows=_hidden_rows(timeline),
        data=page_json(timeline, times),
    )


def _name(timeline: Timeline) -> str:
    """The scheduler, and an order from outside; of their files the page has no digest."""
    config = timeline.head.config
    names = [config.scheduler, config.scheduling_policy]
    return ", ".join(
        [
            each.partition(" (sha256:")[0]
            for each in names
            if each == names[0] or " (sha256:" in each
        ]
    )


def _template(name: str) -> Template:
    return Template((PAGE_FOLDER / name).read_text(encoding="utf-8"))


@cache
def bundled_script() -> str:
    """The modules of the page as one: their imports left out, since one module has all names."""
    texts = [(PAGE_FOLDER / name).read_text(encoding="utf-8") for name in MODULES]
    return "\n".join([_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts])


def _style() -> str:
    return palette_css() + "".join(
        [(PAGE_FOLDER / name).read_text(encoding="utf-8") for name in STYLES]
    )


def _policy(style: str, script: str) -> str:
    """A policy that allows this style and this script alone."""
    style_hash, script_hash = (
        b64encode(sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'"
    )


def _figures(shown: Mapping[str, float]) -> Iterator[str]:
    """Yield a term with its values for each group of figures."""
    served = int(shown["requests"])
    gaps = int(shown["output_tokens"]) - served
    has_gaps = shown["p99_inter_token_ms"] > 0

    def pair(name: str, count: int = served) -> str:
        median = shown[f"median_{name}_ms"]
        most = shown[f"p99_{name}_ms"]
        return f"<b>{_time(median)}</b> median<br>{p99_name(count)}: {_time(most)}"

    between = "none: each answer arrives whole"
    if has_gaps:
        between = pair("inter_token", gaps)
    groups = {
        "Output": f"<b>{_number(shown['output_tokens_per_s'])}</b> tokens/s<br>"
        f"{_number(shown['requests_per_s'])} requests/s",
        "Time to first token": pair("ttft"),
        "Latency of an answer": pair("latency"),
        "Latency by generated token": pair("normalized_latency"),
        "Between two tokens": between,
        "Requests in an iteration": f"<b>{shown['mean_batch_size']:,.1f}</b> on average",
        "Device idle": f"<b>{100 * shown['device_idle_share']:.1f}</b> % of the time, at most",
        "Preemptions": f"<b>{shown['preemptions']:,.0f}</b><br>{shown['cached_tokens']:,.0f} prompt tokens cached",
    }
    for term, value in groups.items():
        yield f"<div><dt>{term}</dt><dd>{value}</dd></div>"


def _time(ms: float) -> str:
    if ms < 1000:
        return f"{_number(ms)} ms"
    return f"{_number(ms / 1e3)} s"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _rows(timeline: Timeline, times: Mapping[int, Sequence[float]]) -> Iterator[str]:
    """Yield a row of the table for each request, up to `MAX_ROWS`."""
    begin = timeline.origin
    for n, arrival in list(timeline.arrivals.items())[:MAX_ROWS]:
        end = timeline.ends.get(n)
        first = f"{times[n][0] - arrival.at:.3f}" if times.get(n) else ""
        answer = f"{end.at - arrival.at:.3f}" if end else ""
        cells = [
            arrival.prompt,
            end.generated if end else "",
            f"{arrival.at - begin:.3f}",
            first,
            answer,
        ]
        name = escape(f"#{n}: {arrival.request_id}")
        values = "".join(
            f"<td>{cell}</td>" for cell in [*cells, end.reason if end else "not in the recording"]
        )
        yield f'<tr><th scope="row">{name}</th>{values}</tr>'


def _hidden_rows(timeline: Timeline) -> str:
    hidden = len(timeline.arrivals) - MAX_ROWS
    if hidden > 0:
        return f'<p class="muted small">The chart has {hidden:,} more requests.</p>'
    return ""
