// The right half of the page: the engine's requests and iterations as they happen, and bursts.

import { Burst, burstInAddress, putInAddress } from "./burst.js";
import { Chart } from "./chart.js";
import { announce, copy, download, element, find } from "./dom.js";
import { drawBatch, drawChart, inNextFrame, LABEL, layoutOf, lookOf, MIN_ROW, prepare, readTheme } from "./draw.js";
import { pictureOf } from "./picture.js";
import { callOf, grouped, joined } from "./reads.js";
import { evenScale } from "./scale.js";
import { IterationStream } from "./stream.js";
import { Timeline } from "./timeline.js";
import { batchText, spanText } from "./words.js";

const COLUMN = 14; // pixels of an iteration in the live chart
const NARROW = [500, 8]; // below this width, columns of this width
const TEXT_MS = 250; // between two updates of the figures
const SUMMARY_MS = 3000; // between two updates for screen readers
const RATE_SECONDS = 2;
const TABLE_ROWS = 200;
const TRIES = 8; // every TEXT_MS
const NUMBERED_ROW = 9; // pixels of a row whose number can be read
const CHART_EDGES = 20; // pixels of a chart beside its rows

export class EngineView {
  constructor(settings, onState) {
    this.settings = settings;
    this.timeline = new Timeline();
    this.theme = readTheme();
    this.burst = null;
    this.chart = new Chart(find("rows"), (cell) => this.show(cell));
    this.draw = inNextFrame(() => this.drawNow());
    this.texts = this.summary = 0; // times of the last updates
    this.heard = 0; // time of the last line
    this.stream = new IterationStream({
      onLines: (lines) => this.take(lines),
      onDropped: (count) => (this.timeline.dropped += count),
      onState: (state) => {
        find("pause").textContent = state === "paused" ? "Resume" : "Pause";
        find("pause").setAttribute("aria-pressed", String(state === "paused"));
        onState(state);
      },
    });
    find("live-title").classList.add(...settings.scheduler.split(", "));
    this.seed = 1; // of the next burst
    this.takeAddress();
    this.listen();
    this.stream.start();
  }

  listen() {
    find("pause").addEventListener("click", () => (this.stream.isOn ? this.stream.stop() : this.stream.start()));
    find("burst").addEventListener("click", () => this.sendBurst());
    find("picture").addEventListener("click", () => this.savePicture());
    find("page").addEventListener("click", () => this.savePage());
    find("link").addEventListener("click", () => copy(location.href, "link"));
    addEventListener("hashchange", () => this.takeAddress());
    find("compare").addEventListener("change", () => this.compare());
    find("table-part").addEventListener("toggle", () => this.showTable());
    new ResizeObserver(() => this.redraw()).observe(find("engine"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.retheme());
    // The rates fall to zero some time after the last iteration.
    setInterval(() => performance.now() - this.heard < 2 * SUMMARY_MS && this.draw(), TEXT_MS);
  }

  /** The next burst is that of the address, if it has one. */
  takeAddress() {
    const given = burstInAddress();
    if (!given) return;
    const size = find("burst-size");
    if (![...size.options].some((each) => each.value === `${given.count}`)) size.append(element("option", {}, `${given.count}`));
    size.value = given.count;
    this.seed = given.seed;
    find("gain").textContent = `The address names a burst of ${given.count} requests (seed ${given.seed}). Send it to compare.`;
  }

  retheme() {
    this.theme = readTheme();
    this.redraw();
  }

  /** Draw all in the next frame, also the parts that change rarely. */
  redraw() {
    this.texts = 0;
    this.draw();
  }

  take(lines) {
    for (const line of lines) {
      this.timeline.take(line);
      this.burst?.keep(line);
    }
    this.heard = performance.now();
    this.draw();
  }

  drawNow() {
    const isComparing = find("compare").checked && this.burst?.hasBegun;
    const replay = isComparing ? prepare(find("replay")) : null;
    if (replay) this.burst.drawReplay(replay, this.theme);
    this.drawRows(isComparing ? this.burst.view() : null);
    const now = performance.now();
    if (now - this.texts >= TEXT_MS) {
      this.texts = now;
      this.drawBatch();
      this.showFigures(now);
      if (this.burst) this.showResult();
    }
    if (now - this.summary >= SUMMARY_MS) {
      this.summary = now;
      this.showSummary();
      this.showTable();
    }
  }

  drawRows(comparison) {
    const target = this.chart.prepare();
    if (!target) return;
    const { next } = this.timeline;
    const width = target.width - LABEL - 4;
    const column = target.width < NARROW[0] ? NARROW[1] : COLUMN;
    const count = comparison ? comparison.count : Math.max(1, Math.floor(width / column));
    const first = comparison ? comparison.first : Math.max(0, next - count);
    const label = comparison ? comparison.label : (each) => this.numberOf(each);
    const requests = comparison ? comparison.requests : this.shown(first, Math.floor((target.height - 20) / MIN_ROW));
    if (this.chart.chosen?.column < first) this.chart.choose(null); // it has left the live chart
    const until = comparison ? comparison.until : next;
    const view = { scale: evenScale(first, width / count, label), from: first, until, end: comparison?.end };
    this.chart.draw(target, grouped(requests).map(rowOf), view, this.theme);
  }

  /** The requests of the live chart: first those that run or have just ended, then those that wait. */
  shown(first, most) {
    const all = [...this.timeline.requests.values()].filter((each) => each.state !== "ended" || each.end >= first);
    if (all.length <= most) return all;
    const waiting = all.filter((each) => each.state === "waiting");
    const others = all.filter((each) => each.state !== "waiting").slice(-most);
    return [...others, ...waiting.slice(0, most - others.length)];
  }

  numberOf(column) {
    return this.timeline.column(column)?.iteration ?? null;
  }

  /** The figures of a burst that has ended, until the engine works again. */
  get kept() {
    const { burst, timeline } = this;
    if (!burst?.figures) return null;
    // The iteration after the last answer may still come: it was submitted before the end was known.
    return timeline.next <= burst.first + burst.elapsed + 1 ? burst.figures : null;
  }

  /** The iteration under the cursor, else the fullest one of a burst that has ended, else the last one. */
  get chosen() {
    const { chosen } = this.chart;
    return (chosen && this.timeline.column(chosen.column)) ?? this.kept?.fullest ?? this.timeline.lastColumn;
  }

  drawBatch() {
    const target = prepare(find("batch"));
    const last = this.chosen;
    if (!target || !last) return;
    const members = last.members.map((each) => ({ ...each, ...lookOf(each.n) }));
    drawBatch(target, members, this.theme);
  }

  showFigures(now) {
    const { timeline } = this;
    const last = timeline.lastColumn;
    const { kept } = this;
    const isIdle = now - this.heard > 1000 * RATE_SECONDS || !last;
    const rates = kept?.rates ?? (isIdle ? { tokens: 0, device: 0, host: 0 } : timeline.rates(RATE_SECONDS));
    const running = timeline.count("running");
    const waiting = timeline.count("waiting") + timeline.count("preempted");
    const pages = timeline.engine?.num_pages ?? 0;
    const set = (name, value) => (document.querySelector(`[data-figure="${name}"]`).textContent = value);
    set("tokens", rates.tokens.toFixed(0));
    set("running", running);
    set("rows", timeline.engine?.num_rows ?? 0);
    set("waiting", waiting);
    set("held", waiting && last?.held ? `for ${last.held}` : "");
    set("pages", kept ? pages - kept.free : running + waiting && last ? pages - last.free_pages : 0);
    set("all-pages", pages);
    set("device", rates.device.toFixed(2));
    set("host", rates.host.toFixed(2));
    find("engine-title").textContent = kept ? "Engine, figures of the burst" : "Engine, live";
    const fullest = kept && this.chosen === kept.fullest ? "the fullest, " : "";
    if (last) find("batch-text").textContent = fullest + textOf(this.chosen) + (timeline.dropped ? `; ${timeline.dropped} lines dropped` : "");
  }

  showResult() {
    const { burst } = this;
    find("gain").textContent = burst.headline();
    find("basis").textContent = burst.basis();
    find("result").textContent = burst.text();
    for (const name of ["picture", "page", "link"]) find(name).disabled = !burst.isOver;
  }

  showSummary() {
    const { timeline } = this;
    const last = timeline.lastColumn;
    const live = `${timeline.count("running")} requests run and ${timeline.count("waiting")} wait.`;
    const text = last ? `${live} The last iteration was ${textOf(last)}.` : "The engine has not worked since this page opened.";
    if (find("summary").textContent !== text) find("summary").textContent = text;
  }

  showTable() {
    if (!find("table-part").open) return;
    const rows = [...this.timeline.requests.values()].slice(-TABLE_ROWS).map((each) => {
      const state = each.state === "ended" ? `ended (${each.reason})` : each.state;
      const cells = [state, each.prompt ?? "?", each.computed, each.generated, each.limit ?? "?", each.iterations];
      return element("tr", {}, element("th", { scope: "row" }, `#${each.n}`), ...cells.map((text) => element("td", {}, `${text}`)));
    });
    find("table").replaceChildren(...rows);
  }

  show(cell) {
    if (cell) find("cell").textContent = this.cellText(cell);
    this.redraw(); // at once, since the merged batch is that of the chosen iteration
  }

  cellText({ n, column }) {
    const requests = [...this.timeline.requests.values()].filter((each) => each.call === n);
    const name = requests.length > 1 ? `Reads of call ${n}` : `Request ${n}`;
    const where = `${name}, iteration ${this.numberOf(column) ?? "?"}: `;
    const { open, spans, end } = requests.length ? rowOf(requests) : { spans: [], end: null };
    const span = open && open.first <= column ? open : spans.find((each) => each.first <= column && column <= each.last);
    const isOver = end !== null && column > end;
    return where + (isOver ? "ended before" : spanText(span, column));
  }

  async sendBurst() {
    this.burst = new Burst(Number(find("burst-size").value), this.seed++, this.settings, this.timeline);
    putInAddress(this.burst);
    this.compare();
    find("burst").disabled = true;
    try {
      await this.burst.run();
      announce(`${this.burst.headline()}. ${this.burst.basis()}`);
    } catch (error) {
      find("cell").textContent = `The burst failed: ${error.message}`;
    }
    find("burst").disabled = false;
  }

  get numArrived() {
    return this.timeline.numArrived;
  }

  /** What `look` finds in the timeline; null if the engine does not tell soon. */
  async soon(look) {
    for (let i = 0; i < TRIES; i++) {
      const found = look([...this.timeline.requests.values()]);
      if (found) return found;
      await new Promise((resolve) => setTimeout(resolve, TEXT_MS));
    }
    return null;
  }

  /** Tokens per second of the newest request with these counts since `since`; null if the engine tells of none soon. */
  async rateOf({ prompt_tokens: prompt, completion_tokens: generated }, since) {
    const isIt = (each) => each.n >= since && each.prompt === prompt && each.generated >= generated && each.state === "ended";
    return (await this.soon((requests) => requests.findLast(isIt)))?.rate ?? null;
  }

  /** The iterations in which the reads of a call ended, [{iteration, count}]; null as in `callOf`. */
  async endsOf(tokens, since) {
    const reads = await this.soon((requests) => callOf(requests, since, tokens));
    const counts = new Map();
    for (const { end } of reads ?? []) counts.set(end, (counts.get(end) ?? 0) + 1);
    const ends = [...counts].sort(([one], [other]) => one - other);
    return reads && ends.map(([end, count]) => ({ iteration: this.numberOf(end), count }));
  }

  compare() {
    const isOn = find("compare").checked && this.burst !== null;
    find("replay-figure").hidden = !isOn;
    find("engine").classList.toggle("comparing", isOn);
    find("live-title").textContent = isOn ? this.burst.title : "Requests by iteration";
    // Each row of a comparison has room for its number; a large burst makes the charts longer.
    const height = isOn ? `${NUMBERED_ROW * this.burst.lengths.length + CHART_EDGES}px` : "";
    for (const name of ["rows", "replay"]) find(name).style.minHeight = height;
    this.redraw();
  }

  async savePage() {
    try {
      download("burst.html", await this.burst.page());
    } catch (error) {
      find("cell").textContent = `The page cannot be saved: ${error.message}`;
    }
  }

  savePicture() {
    const { burst, settings, theme } = this;
    const rows = grouped(burst.requests).map(rowOf);
    const { until, end } = burst.view();
    const drawLive = (target, scale) => drawChart(target, rows, { scale, until, end, layout: layoutOf(target, rows.length), cursor: null }, theme);
    const machine = settings.machine ? ` on ${settings.machine}` : "";
    const about = [burst.basis(), `${settings.model}${machine}; scheduler ${settings.scheduler}. ${burst.text().split(". ")[0]}.`];
    pictureOf(burst, drawLive, about, theme).toBlob((blob) => download("burst.png", blob));
  }
}

const textOf = (iteration) => batchText(iteration.iteration, iteration.tokens, iteration.members);

/** A row of one request, or of the reads of a call. */
function rowOf(requests) {
  const [first] = requests;
  const isOpen = requests.every(({ state }) => state === "waiting" || state === "preempted");
  const hasEnded = requests.every(({ state }) => state === "ended");
  return {
    n: first.call,
    ...lookOf(first.call, requests.length),
    spans: joined(requests.map(({ spans }) => spans)),
    open: isOpen ? { kind: first.state, first: first.since } : null,
    end: hasEnded ? Math.max(...requests.map(({ end }) => end)) : null,
  };
}
