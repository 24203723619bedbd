// The page of a recorded timeline: its data are in the page, and nothing is loaded.

import { Chart } from "./chart.js";
import { drawBatch, inNextFrame, LABEL, lookOf, prepare, readTheme, spanAt } from "./draw.js";
import { evenScale, timeScale } from "./scale.js";
import { batchText, counted, spanText } from "./words.js";

const KINDS = ["chunk", "increment", "repeat", "waiting", "preempted"];
const WORK = KINDS.slice(0, 3);
const SPAN = 5; // numbers: kind, first and last column, position, tokens
const ZOOM = 1.6;
const LEAST = 2; // pixels of a column at the start; more columns are reached by scrolling
const MOST = 60;
const PLAY_MS = 120;
const TOP = 56; // pixels of the bars above the rows
const MARGIN = LABEL + 10;
const HEIGHT = [190, Math.max(300, Math.min(620, 0.5 * innerHeight))]; // of the chart

const MARKS = ["", "2"]; // at the end of the ids of a run; the page has one or two

const get = (id) => document.getElementById(id);
const milliseconds = (seconds) => `${(1e3 * seconds).toFixed(2)} ms`;

/** The iterations and requests of the page's data; columns are iterations, and times are in seconds. */
class Recording {
  constructor({ iterations, requests }) {
    const seconds = (each) => each / 1e6;
    this.iterations = iterations; // arrays by name
    this.count = iterations.number.length;
    this.begins = iterations.begin.map(seconds);
    this.ends = iterations.end.map(seconds);
    this.requests = requests.map((each) => this.decoded(each));
    this.byNumber = new Map(this.requests.map((each) => [each.n, each]));
    const { tokens, chunk, repeat, padding } = iterations;
    this.parts = (i) => [tokens[i] - chunk[i] - repeat[i], chunk[i], repeat[i] + padding[i]];
  }

  decoded(request) {
    const spans = [];
    for (let i = 0; i < request.spans.length; i += SPAN) {
      const [kind, first, last, start, tokens] = request.spans.slice(i, i + SPAN);
      spans.push({ kind: KINDS[kind], first, last, start, tokens });
    }
    const last = spans.at(-1)?.last ?? -1;
    const end = request.reason === null || last < 0 ? null : last;
    return { ...request, spans, from: spans[0]?.first ?? 0, to: last, end, open: null, ...lookOf(request.n, request.reads) };
  }

  /** The requests that live in some of the columns. */
  alive(first, last) {
    return this.requests.filter((each) => each.to >= first && each.from <= last);
  }

  span(request, column) {
    const span = request.spans[spanAt(request.spans, column)];
    return span && span.first <= column ? span : null;
  }

  /** The iteration with the most members. */
  fullest() {
    const changes = new Int32Array(this.count + 1);
    for (const { spans } of this.requests) {
      for (const { kind, first, last } of spans) {
        if (!WORK.includes(kind)) continue;
        changes[first] += 1;
        changes[last + 1] -= 1;
      }
    }
    let [size, most, fullest] = [0, 0, 0];
    for (let column = 0; column < this.count; column++) {
      size += changes[column];
      if (size > most) [most, fullest] = [size, column];
    }
    return fullest;
  }

  members(column) {
    const members = [];
    for (const request of this.requests) {
      const span = this.span(request, column);
      if (!span || !WORK.includes(span.kind)) continue;
      const tokens = Math.round(span.tokens / (span.last - span.first + 1));
      members.push({ n: request.n, label: request.label, color: request.color, tokens, kind: span.kind });
    }
    return members;
  }
}

class RecordingView {
  /**
   * mark: the end of its ids. views: all views of the page; they have one unit, one scale and one place.
   * most: columns and seconds of the longest recording.
   */
  constructor(recording, mark, views, most) {
    this.recording = recording;
    this.get = (id) => get(id + mark);
    this.views = views;
    this.most = most;
    this.theme = readTheme();
    this.isTimed = false;
    this.scale = 1; // pixels of a column, or of a second
    this.draw = inNextFrame(() => this.drawNow());
    this.view = this.get("view");
    this.chart = new Chart(this.get("rows"), (cell, isByKey) => this.show(cell, isByKey), true);
    this.minRow = matchMedia("(pointer: coarse)").matches ? 13 : 6;
    this.timer = null; // while it plays
    this.listen();
    this.fit(LEAST);
    this.open();
  }

  /** Begin at the fullest iteration; a page with the address #play begins to play. */
  open() {
    this.resize();
    const column = this.recording.fullest();
    this.center(column);
    this.chooseIn(column);
    if (location.hash === "#play") this.play(0);
  }

  /** Choose a member of an iteration, if possible that of the iteration before. */
  chooseIn(column) {
    const members = this.recording.members(column);
    const before = this.chart.chosen?.n;
    const n = members.some((each) => each.n === before) ? before : (members[0]?.n ?? before);
    if (n !== undefined) this.chart.choose({ n, column }, true);
  }

  /** Go through the iterations; a second call stops it. */
  play(from = this.chart.chosen?.column ?? 0) {
    const last = this.recording.count - 1;
    let column = from < last ? from : 0;
    const stop = () => {
      clearInterval(this.timer);
      this.timer = null;
      this.get("play").textContent = "Play";
    };
    if (this.timer !== null) return stop();
    this.get("play").textContent = "Stop";
    this.timer = setInterval(() => {
      this.chooseIn(column);
      if (column++ >= last) stop();
    }, PLAY_MS);
  }

  listen() {
    this.view.addEventListener("scroll", () => this.scrolled());
    new ResizeObserver(() => this.draw()).observe(this.view);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.theme = readTheme();
      this.draw();
    });
    this.get("in").addEventListener("click", () => this.zoomAll(ZOOM));
    this.get("out").addEventListener("click", () => this.zoomAll(1 / ZOOM));
    this.get("fit").addEventListener("click", () => this.views.forEach((each) => each.fit(0)));
    this.get("play").addEventListener("click", () => this.play());
    this.get("before").addEventListener("click", () => this.chart.move(0, -1));
    this.get("after").addEventListener("click", () => this.chart.move(0, 1));
    for (const unit of this.get("units").children) {
      unit.addEventListener("click", () => this.views.forEach((each) => each.setUnit(unit.dataset.unit)));
    }
    this.get("rows").addEventListener("keydown", (event) => {
      if (event.key === "+" || event.key === "=") this.zoomAll(ZOOM);
      if (event.key === "-") this.zoomAll(1 / ZOOM);
    });
  }

  /** The length of the whole axis, in columns or seconds. */
  get extent() {
    return this.isTimed ? this.most.seconds : this.most.columns;
  }

  get room() {
    return Math.max(50, this.view.clientWidth - MARGIN);
  }

  scrolled() {
    for (const { view } of this.views) {
      if (view.scrollLeft !== this.view.scrollLeft) view.scrollLeft = this.view.scrollLeft;
    }
    this.draw();
  }

  setUnit(unit) {
    const column = this.chart.chosen?.column ?? this.columnAt(0.5);
    this.isTimed = unit === "seconds";
    for (const each of this.get("units").children) each.setAttribute("aria-pressed", String(each.dataset.unit === unit));
    this.fit(LEAST);
    this.resize();
    this.center(column);
  }

  /** Show the whole run, or a part of it if its columns would be much narrower than `least` pixels. */
  fit(least) {
    const [whole, wide] = [this.room / this.extent, (least * this.most.columns) / this.extent];
    this.scale = wide > 1.3 * whole ? wide : whole;
    this.draw();
  }

  zoomAll(factor) {
    for (const each of this.views) each.zoom(factor);
  }

  zoom(factor) {
    const column = this.chart.chosen?.column ?? this.columnAt(0.5);
    const least = this.room / this.extent;
    const most = (MOST * this.most.columns) / this.extent;
    this.scale = Math.max(least, Math.min(most, this.scale * factor));
    this.resize();
    this.center(column);
  }

  /** The column at a share of the visible width. */
  columnAt(share) {
    return Math.min(this.axis().columnAt(LABEL + share * this.room), this.recording.count - 1);
  }

  place(column) {
    return this.isTimed ? this.recording.begins[column] : column;
  }

  center(column) {
    this.view.scrollLeft = this.place(column) * this.scale - this.room / 2;
    this.draw();
  }

  /** The scale of what is scrolled into view. */
  axis() {
    const { recording, scale } = this;
    const first = this.view.scrollLeft / scale;
    if (this.isTimed) return timeScale(recording.begins, recording.ends, first, scale);
    const time = (column) => `${recording.begins[column].toFixed(2)} s`;
    return evenScale(first, scale, (column) => recording.iterations.number[column] ?? null, time);
  }

  resize() {
    this.get("space").style.width = `${Math.ceil(this.extent * this.scale + MARGIN)}px`;
  }

  drawNow() {
    const { recording, view } = this;
    this.resize();
    const scale = this.axis();
    const until = recording.count;
    const rows = recording.alive(scale.columnAt(LABEL), Math.min(scale.columnAt(LABEL + this.room), until - 1));
    const axis = (this.isTimed ? 18 : 32) + TOP + 2;
    const wanted = axis + rows.length * Math.max(this.minRow, Math.min(18, (HEIGHT[1] - axis) / rows.length));
    this.setHeight(Math.max(HEIGHT[0], Math.min(HEIGHT[1], wanted + 16)));
    this.get("space").style.height = `${axis + rows.length * this.rowHeight(rows.length, axis)}px`;
    this.get("rows").style.width = `${view.clientWidth}px`;
    this.get("rows").style.height = `${view.clientHeight}px`;
    const target = this.chart.prepare();
    if (!target) return;
    const size = { lines: this.isTimed ? 1 : 2, top: TOP, scroll: view.scrollTop, minRow: this.minRow };
    this.chart.draw(target, rows, { scale, until, bars: recording.parts, size }, this.theme);
    this.drawBatch(this.chart.chosen?.column ?? this.columnAt(0));
  }

  rowHeight(count, axis) {
    return Math.max(this.minRow, Math.min(18, (this.view.clientHeight - axis) / Math.max(1, count)));
  }

  /** Chosen once: a height that follows a scroll would move the page. */
  setHeight(height) {
    if (this.height) return;
    this.height = height;
    this.view.style.height = `${height}px`;
  }

  drawBatch(column) {
    const { number, tokens } = this.recording.iterations;
    const members = this.recording.members(column);
    this.get("batch-text").textContent = batchText(number[column], tokens[column], members);
    const target = prepare(this.get("batch"));
    if (target) drawBatch(target, members, this.theme);
  }

  show(cell, isByKey) {
    if (cell && isByKey) this.reveal(cell);
    if (cell) this.showDetails(cell);
    this.draw();
  }

  /** Scroll a cell into view. */
  reveal({ column }) {
    const { left, right } = this.axis();
    if (left(column) < LABEL || right(column) > this.view.clientWidth - 8) this.center(column);
  }

  showDetails({ n, column }) {
    const { recording } = this;
    const request = recording.byNumber.get(n);
    const text = column > request.to ? "ended before" : column < request.from ? "not there yet" : spanText(recording.span(request, column), column);
    this.get("cell").textContent = `Request ${n}, iteration ${recording.iterations.number[column]}: ${text}.`;
    this.get("request").textContent = requestText(request);
    this.get("iteration").textContent = this.iterationText(column);
  }

  iterationText(column) {
    const of = Object.fromEntries(Object.entries(this.recording.iterations).map(([name, values]) => [name, values[column]]));
    const queue = `${of.running} running, ${of.waiting} waiting${of.held ? ` (the first one for ${of.held})` : ""}`;
    const times = `device ${milliseconds(of.device / 1e6)}, host ${milliseconds(of.host / 1e6)}`;
    return (
      `Iteration ${of.number} at ${this.recording.begins[column].toFixed(3)} s: ${counted(of.tokens, "token")}, ` +
      `${of.padding} of padding, ${counted(of.launches, "launch", "launches")}; ${queue}; ` +
      `${counted(of.free, "page")} free; ${times}.`
    );
  }
}

function requestText({ n, id, prompt, limit, generated, cached, arrival, first, answer, reason }) {
  const seconds = (each) => `${((each - arrival) / 1e6).toFixed(3)} s`;
  const name = `Request ${n} (${id}): ${counted(prompt, "prompt token")}${cached ? `, ${cached} of them cached` : ""}`;
  const begun = first === null ? "" : `, the first after ${seconds(first)}`;
  if (reason === null) return `${name}, at most ${limit} to generate; no end in the recording.`;
  return `${name}, ${counted(generated, "generated token")}${begun}; ended (${reason}) after ${seconds(answer)}.`;
}

document.documentElement.classList.add("has-script");
const marks = MARKS.filter((mark) => get(`recording${mark}`));
const recordings = marks.map((mark) => new Recording(JSON.parse(get(`recording${mark}`).textContent)));
const most = {
  columns: Math.max(...recordings.map((each) => each.count)),
  seconds: Math.max(...recordings.map((each) => each.ends.at(-1) ?? 1)),
};
const views = [];
recordings.forEach((each, i) => views.push(new RecordingView(each, marks[i], views, most)));
