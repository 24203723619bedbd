// Drawings of a timeline on canvases. The colour of a mark is its request, and its shape is the kind of its work.

export const LABEL = 44; // pixels left of the chart, for the numbers of requests
const AXIS = 18; // pixels below the chart, for a line of numbers
const MAX_ROW = 18;
const LEAST_TEXT = 8; // pixels of a number beside a row
const THIN_ROW = 4; // below this height, rows have no room for different shapes
export const MIN_ROW = 3;
const NUM_COLORS = 6;

/** The name of a row and the index of its colour, from the number of its request, or of its first one of several. */
export const lookOf = (n, count = 1) => ({ label: count > 1 ? `${count}x#${n}` : `#${n}`, color: n % NUM_COLORS });

/** A function that lets `draw` run in the next frame, once for all calls before it. */
export function inNextFrame(draw) {
  let isWaiting = false;
  return () => {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      draw();
    });
  };
}

/** The colours of the page's style. */
export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    colors: Array.from({ length: NUM_COLORS }, (_, i) => read(`--r${i}`)),
    page: read("--page"),
    card: read("--card"),
    text: read("--text"),
    muted: read("--muted"),
    line: read("--line"),
    idle: read("--idle"),
    bad: read("--bad"),
  };
}

/** A context in CSS pixels on a cleared canvas, and its size; null while the canvas is hidden. */
export function prepare(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return null;
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/**
 * Where a chart has its rows: all of them below each other, or those that a scroll by `scroll` pixels shows.
 *
 * lines: number of lines of the axis; top: pixels above the rows; minRow: least height of a row.
 */
export function layoutOf({ width, height }, numRows, { lines = 1, top = 0, scroll = 0, minRow = 0 } = {}) {
  const bottom = height - 4 - (AXIS - 4) * lines;
  const row = Math.max(minRow, Math.min(MAX_ROW, (bottom - top - 2) / Math.max(1, numRows)));
  const first = Math.min(Math.floor(scroll / row), Math.max(0, numRows - 1));
  const last = Math.min(numRows - 1, Math.ceil((scroll + bottom - top) / row));
  return { left: LABEL, right: width, top, bottom, row, first, last, y: (index) => top + 1 + index * row - scroll };
}

/**
 * Draw rows of spans.
 *
 * rows: [{label, color, spans: [{kind, first, last, tokens}], open: {kind, first} | null, end}] with columns as numbers;
 * `spans` are in order, `open` is a wait without an end, `end` the last column of a request that has ended.
 * view: {scale, until, end, layout, cursor: {row, column} | null, bars}; nothing is drawn from column `until` on but the
 * axis, which goes on to `end` if it is given; `bars(column)`, if there is one, has the tokens [increments, prefill, waste]
 * of an iteration, for a bar above the rows.
 */
export function drawChart({ context }, rows, view, theme) {
  const { layout, scale } = view;
  const visible = { first: scale.columnAt(layout.left), last: Math.min(scale.columnAt(layout.right), view.until - 1) };
  drawAxis(context, layout, scale.ticks(layout, view.end ?? view.until), theme);
  context.save();
  context.beginPath();
  context.rect(layout.left, 0, Math.max(0, scale.right(view.until - 1) - layout.left), layout.bottom);
  context.clip();
  if (view.bars) drawBars(context, view, visible, theme);
  context.beginPath();
  context.rect(layout.left, layout.top, layout.right, layout.bottom - layout.top);
  context.clip();
  const spans = [];
  for (let i = layout.first; i <= layout.last; i++) addSpans(spans, rows[i], layout.y(i), view, visible);
  const [work, waits] = [spans.filter((each) => !isWait(each)), spans.filter(isWait)];
  for (const each of work) drawSpan(context, layout, each, theme);
  if (scale.hasGrid) drawGrid(context, view, visible, theme);
  for (const each of waits) drawSpan(context, layout, each, theme); // lines without gaps
  for (const each of work) if (each.kind === "chunk") drawCount(context, layout, each, theme);
  context.restore();
  context.save();
  context.beginPath();
  context.rect(0, layout.top, layout.right, layout.bottom - layout.top);
  context.clip();
  for (let i = layout.first; i <= layout.last; i++) drawEnd(context, rows[i], layout.y(i), view, visible, theme);
  drawLabels(context, layout, rows, theme);
  if (view.cursor) drawCursor(context, view, theme);
  context.restore();
}

const sum = (values) => values.reduce((total, each) => total + each, 0);

const isWait = ({ kind }) => kind === "waiting" || kind === "preempted";

/** Index of the first span that does not end before a column. */
export function spanAt(spans, column) {
  let [low, high] = [0, spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].last < column) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Add the visible spans of a row, each with its place in pixels and its colour. Of those within a pixel one is drawn. */
function addSpans(found, row, y, { scale, until }, visible) {
  let edge = -Infinity;
  const add = (span, last) => {
    const right = scale.right(last);
    if (right - edge < 0.5) return;
    const x = Math.max(scale.left(span.first), edge);
    const width = Math.max(1, right - x); // thinner ones would be pale
    edge = x + width;
    found.push({ kind: span.kind, tokens: span.tokens, color: row.color, x, y, width });
  };
  for (let i = spanAt(row.spans, visible.first); i < row.spans.length && row.spans[i].first <= visible.last; i++) {
    add(row.spans[i], row.spans[i].last);
  }
  if (row.open && row.open.first <= visible.last) add(row.open, Math.max(row.open.first, until - 1));
}

function drawSpan(context, layout, { kind, color, x, y, width }, theme) {
  const isThin = layout.row < THIN_ROW;
  const gap = layout.row > 6 ? 1 : 0;
  const height = layout.row - 2 * gap;
  switch (kind) {
    case "chunk":
      context.fillStyle = theme.colors[color];
      context.fillRect(x, y + gap, width, height);
      break;
    case "increment":
      context.fillStyle = theme.colors[color];
      if (isThin) context.fillRect(x, y, width, height);
      else context.fillRect(x, y + gap + 0.27 * height, width, Math.max(1, 0.46 * height));
      break;
    case "repeat":
      if (isThin) drawFaint(context, x, y, width, height, theme);
      else drawHatch(context, layout, x, y + gap, width, height, theme);
      break;
    default: { // waiting, preempted
      const isWaiting = kind === "waiting";
      context.strokeStyle = isWaiting ? theme.idle : theme.bad;
      context.lineWidth = Math.min(isWaiting ? 1 : 2, layout.row / (isThin ? 4 : 3));
      context.setLineDash(isWaiting ? [] : [4, 3]);
      context.beginPath();
      context.moveTo(x, y + layout.row / 2);
      context.lineTo(x + width, y + layout.row / 2);
      context.stroke();
      context.setLineDash([]);
    }
  }
}

function drawFaint(context, x, y, width, height, theme) {
  context.globalAlpha = 0.35;
  context.fillStyle = theme.idle;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
}

/** Write the number of tokens of a chunk into it. */
function drawCount(context, layout, { tokens, x, y, width }, theme) {
  if (layout.row < 10 || width < 9) return;
  context.fillStyle = theme.card;
  context.font = "600 10px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  const text = tokens < 1000 ? tokens : `${Math.round(tokens / 1000)}k`;
  context.fillText(text, x + width / 2, y + layout.row / 2 + 0.5, width - 2);
}

/** A diamond at the end of a request. */
function drawEnd(context, row, top, { layout, scale }, visible, theme) {
  if (row.end === null || row.end < visible.first || row.end > visible.last) return;
  const x = scale.right(row.end);
  const y = top + 0.5 * layout.row;
  const size = Math.min(4, 0.4 * layout.row + 1);
  context.fillStyle = theme.text;
  context.beginPath();
  for (const [dx, dy] of [[0, -size], [size, 0], [0, size], [-size, 0]]) context.lineTo(x + dx, y + dy);
  context.fill();
}

function drawHatch(context, layout, x, y, width, height, theme) {
  context.save();
  context.strokeStyle = theme.idle;
  context.lineWidth = 1;
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  const step = height > 6 ? 5 : 3;
  context.beginPath();
  const right = Math.min(x + width, layout.right);
  const hidden = Math.max(0, Math.floor((layout.left - x) / step)); // strokes left of the chart
  for (let at = x + hidden * step - height; at < right; at += step) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

/** Separate the iterations. */
function drawGrid(context, { layout, scale }, visible, theme) {
  context.fillStyle = theme.card;
  const height = layout.bottom - layout.top;
  for (let column = visible.first; column <= visible.last; column++) context.fillRect(scale.right(column) - 0.5, layout.top, 1, height);
}

function drawAxis(context, layout, ticks, theme) {
  context.fillStyle = theme.muted;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  for (const { x, texts } of ticks) {
    context.fillRect(x, layout.bottom, 1, 4);
    texts.forEach((text, line) => context.fillText(text, x + 3, layout.bottom + 13 + (AXIS - 4) * line));
  }
}

/** The tokens of each iteration as a bar: increments, prefill above them, then what is wasted. */
function drawBars(context, { layout, scale, bars }, visible, theme) {
  let most = 1;
  for (let column = visible.first; column <= visible.last; column++) most = Math.max(most, sum(bars(column)));
  const floor = layout.top - 5;
  let [edge, before] = [-Infinity, 0];
  for (let column = visible.first; column <= visible.last; column++) {
    const parts = bars(column);
    const total = sum(parts);
    const [x, right] = [scale.left(column), scale.right(column)];
    if (right - edge < 0.5 && total <= before) continue; // of the iterations in a pixel, the largest is seen
    [edge, before] = [right, total];
    const width = Math.max(0.5, right - x - (scale.hasGrid ? 1 : 0));
    let y = floor;
    parts.forEach((part, kind) => {
      const height = ((floor - 14) * part) / most;
      y -= height;
      context.globalAlpha = [0.55, 1, 0.25][kind];
      context.fillStyle = kind === 1 ? theme.text : theme.idle;
      if (part) context.fillRect(x, y, width, height);
    });
  }
  context.globalAlpha = 1;
  context.fillStyle = theme.line;
  context.fillRect(layout.left, floor, layout.right, 1);
  context.fillStyle = theme.muted;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.fillText(`at most ${most.toLocaleString("en")} tokens in an iteration`, layout.left + 2, 11);
}

function drawLabels(context, layout, rows, theme) {
  const size = Math.max(LEAST_TEXT, Math.min(11, layout.row));
  context.font = `${size}px system-ui, sans-serif`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(LEAST_TEXT / layout.row));
  for (let index = layout.first; index <= layout.last; index++) {
    const y = layout.y(index);
    context.fillStyle = theme.colors[rows[index].color];
    context.fillRect(layout.left - 6, y, 3, Math.max(1, layout.row - 1));
    if (index % every) continue;
    context.fillStyle = theme.muted;
    context.fillText(rows[index].label, layout.left - 9, Math.max(layout.top + 7, y + layout.row / 2 + 0.5), layout.left - 11);
  }
}

function drawCursor(context, { layout, scale, cursor }, theme) {
  context.strokeStyle = theme.text;
  context.lineWidth = 1.5;
  const x = scale.left(cursor.column);
  context.strokeRect(x, layout.y(cursor.row), Math.max(2, scale.right(cursor.column) - x), layout.row);
}

/** The row and the column of a point; null outside of the cells. */
export function cellAt({ layout, scale, until }, numRows, x, y) {
  const row = Math.floor((y - layout.y(0)) / layout.row);
  const column = scale.columnAt(x);
  const isInside = x >= layout.left && y >= layout.top && y < layout.bottom && row >= 0 && row < numRows;
  return isInside && column >= 0 && column < until ? { row, column } : null;
}

/**
 * Draw the tokens of one iteration twice: merged, as in all layers but attention, and split by request, as in attention.
 *
 * members: [{label, color, tokens}]
 */
export function drawBatch(target, members, theme) {
  const { context, width, height } = target;
  const bar = (height - 18) / 2;
  const left = 76;
  const total = sum(members.map((each) => each.tokens));
  const rows = [["all layers", 0, 5], ["attention", Math.min(4, (0.25 * (width - left)) / Math.max(1, members.length)), 13 + bar]];
  for (const [name, gap, y] of rows) {
    context.fillStyle = theme.muted;
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(name, 8, y + bar / 2);
    const scale = (width - left - 8 - gap * Math.max(0, members.length - 1)) / Math.max(total, 12);
    let x = left;
    for (const each of members) {
      drawTokens(context, each, x, y, scale, bar, theme);
      x += each.tokens * scale + gap;
    }
  }
}

function drawTokens(context, member, x, y, scale, height, theme) {
  const width = member.tokens * scale;
  context.fillStyle = theme.colors[member.color];
  context.fillRect(x, y, width, height);
  context.fillStyle = theme.card;
  if (scale >= 4) for (let i = 1; i <= member.tokens; i++) context.fillRect(x + i * scale - 0.5, y, 1, height);
  else context.fillRect(x + width - Math.min(1, 0.3 * width), y, Math.min(1, 0.3 * width), height);
  if (width < 26) return;
  context.font = "600 11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "middle";
  const text = `${member.label}: ${member.tokens}`;
  const shown = context.measureText(text).width + 6 <= width ? text : member.label;
  const pad = context.measureText(shown).width / 2 + 3;
  context.fillStyle = theme.colors[member.color];
  context.fillRect(x + width / 2 - pad, y + 4, 2 * pad, height - 8);
  context.fillStyle = theme.card;
  context.fillText(shown, x + width / 2, y + height / 2 + 0.5);
}
