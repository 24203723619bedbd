// Drawings of a timeline on canvases. The colour of a mark is its request, and its shape is the kind of its work.

const LABEL = 44; // pixels left of the chart, for the numbers of requests
const AXIS = 18; // pixels below the chart
const MAX_ROW = 18;
const THIN_ROW = 4; // below this height, rows have no room for different shapes
export const MIN_ROW = 3;
export const NUM_COLORS = 6;

/** The colours of the page's style. */
export function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    colors: Array.from({ length: NUM_COLORS }, (_, i) => read(`--r${i}`)),
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

/** Where a chart of rows and columns has its cells. */
export function layoutOf({ width, height }, numRows, numColumns) {
  return {
    left: LABEL,
    right: width,
    bottom: height - AXIS,
    row: Math.min(MAX_ROW, (height - AXIS - 2) / Math.max(1, numRows)),
    column: (width - LABEL - 4) / Math.max(1, numColumns),
  };
}

/** Number of columns of this width that fit. */
export const columnsOf = (width, column) => Math.max(1, Math.floor((width - LABEL - 4) / column));

/**
 * Draw rows of spans.
 *
 * rows: [{label, color, spans: [{kind, first, last, tokens}], open: {kind, first} | null, end}] with columns as numbers;
 * `open` is a wait without an end, `end` the column of the last work of a request that has ended.
 * view: {first, count, until, label(column), cursor: {row, column} | null}; nothing is drawn from column `until` on.
 */
export function drawChart(target, rows, view, theme) {
  const { context } = target;
  const layout = layoutOf(target, rows.length, view.count);
  drawAxis(context, layout, view, theme);
  context.save();
  context.beginPath();
  context.rect(layout.left, 0, Math.max(0, (view.until - view.first) * layout.column), layout.bottom);
  context.clip();
  const spans = rows.flatMap((row, index) => spansIn(row, index, layout, view));
  for (const each of spans) drawSpan(context, layout, each, theme);
  if (layout.column >= 5) drawGrid(context, layout, rows.length, view, theme);
  for (const each of spans) if (each.kind === "chunk") drawCount(context, layout, each, theme);
  context.restore();
  rows.forEach((row, index) => drawEnd(context, layout, row, index, view, theme));
  drawLabels(context, layout, rows, theme);
  if (view.cursor) drawCursor(context, layout, view, theme);
}

/** The visible spans of a row, each with its place in pixels and its colour. */
function spansIn(row, index, layout, view) {
  const last = view.first + view.count - 1;
  const open = row.open && { ...row.open, last: Math.max(row.open.first, view.until - 1), tokens: 0 };
  const spans = open ? [...row.spans, open] : row.spans;
  return spans
    .filter((span) => span.last >= view.first && span.first <= last)
    .map((span) => ({
      ...span,
      color: row.color,
      x: layout.left + (span.first - view.first) * layout.column,
      y: 1 + index * layout.row,
      width: (span.last - span.first + 1) * layout.column,
    }));
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
      else drawHatch(context, x, y + gap, width, height, theme);
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
function drawEnd(context, layout, row, index, view, theme) {
  if (row.end === null || row.end < view.first || row.end >= view.until) return;
  const x = layout.left + (row.end + 1 - view.first) * layout.column;
  const y = 1 + (index + 0.5) * layout.row;
  const size = Math.min(4, 0.4 * layout.row + 1);
  context.fillStyle = theme.text;
  context.beginPath();
  for (const [dx, dy] of [[0, -size], [size, 0], [0, size], [-size, 0]]) context.lineTo(x + dx, y + dy);
  context.fill();
}

function drawHatch(context, x, y, width, height, theme) {
  context.save();
  context.strokeStyle = theme.idle;
  context.lineWidth = 1;
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  const step = height > 6 ? 5 : 3;
  for (let at = x - height; at < x + width; at += step) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

/** Separate the iterations. */
function drawGrid(context, layout, numRows, view, theme) {
  context.fillStyle = theme.card;
  const height = numRows * layout.row + 2;
  for (let i = 1; i <= view.count; i++) context.fillRect(layout.left + i * layout.column - 0.5, 0, 1, height);
}

function drawAxis(context, layout, view, theme) {
  context.fillStyle = theme.muted;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  const step = niceStep(70 / layout.column);
  const until = Math.min(view.first + view.count, view.until);
  for (let column = view.first; column < until; column++) {
    const number = view.label(column);
    if (number === null || number % step) continue;
    const x = layout.left + (column - view.first) * layout.column;
    context.fillRect(x, layout.bottom, 1, 4);
    context.fillText(number, x + 3, layout.bottom + 13);
  }
}

function niceStep(least) {
  for (let step = 1; ; step *= 10) {
    for (const each of [1, 2, 5]) if (each * step >= least) return each * step;
  }
}

function drawLabels(context, layout, rows, theme) {
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(14 / layout.row));
  rows.forEach((row, index) => {
    const y = 1 + index * layout.row;
    context.fillStyle = theme.colors[row.color];
    context.fillRect(layout.left - 6, y, 3, Math.max(1, layout.row - 1));
    if (index % every) return;
    context.fillStyle = theme.muted;
    context.fillText(row.label, layout.left - 10, Math.max(7, y + layout.row / 2 + 0.5));
  });
}

function drawCursor(context, layout, view, theme) {
  const { row, column } = view.cursor;
  context.strokeStyle = theme.text;
  context.lineWidth = 1.5;
  const x = layout.left + (column - view.first) * layout.column;
  context.strokeRect(x, 1 + row * layout.row, layout.column, layout.row);
}

/** The row and the column of a point; null outside of the cells. */
export function cellAt(layout, numRows, view, x, y) {
  const row = Math.floor((y - 1) / layout.row);
  const column = view.first + Math.floor((x - layout.left) / layout.column);
  const isInside = row >= 0 && row < numRows && x >= layout.left && column < Math.min(view.until, view.first + view.count);
  return isInside ? { row, column } : null;
}

/**
 * Draw the tokens of one iteration twice: merged, as in all layers but attention, and split by request, as in attention.
 *
 * members: [{label, color, tokens, isChunk}]
 */
export function drawBatch(target, members, theme) {
  const { context, width, height } = target;
  const bar = (height - 18) / 2;
  const left = 76;
  const total = members.reduce((sum, each) => sum + each.tokens, 0);
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
