// One burst: its requests in the engine, and the same requests under request-level scheduling.

import { post } from "./api.js";
import { drawChart, LABEL, layoutOf, lookOf } from "./draw.js";
import { burstOf, requestLevel, spansOf } from "./replay.js";
import { fullestOf, secondsOf, shareText, timeText } from "./result.js";
import { evenScale } from "./scale.js";

const MOST = 256; // requests

export class Burst {
  constructor(count, seed, settings, timeline) {
    this.timeline = timeline;
    const kind = settings.scheduler === "request_level" ? "Request-level" : "Iteration-level";
    this.title = `${kind} scheduling, this engine (${settings.scheduler})`;
    this.seed = seed;
    this.lengths = burstOf(count, settings.context, seed);
    this.requests = []; // those of the timeline, as they arrive
    this.lines = { arrivals: [], iterations: [], ends: [] }; // for the page that can be saved
    this.figures = null; // rates and the fullest batch, from its end on
    this.maxBatch = timeline.engine?.num_rows ?? settings.max_num_seqs;
    this.replay = requestLevel(this.lengths, this.maxBatch);
    for (const request of timeline.requests.values()) request.isKept = false;
    timeline.onArrival = (request) => this.claim(request);
  }

  /** Send the burst; resolves when all its requests have ended. */
  async run() {
    await post("playground/burst", { requests: this.lengths, seed: this.seed });
  }

  /** Requests have no names here: those of the burst are recognised by their lengths, in order. */
  claim(request) {
    const expected = this.lengths[this.requests.length];
    if (!expected || request.prompt !== expected[0] || request.limit !== expected[1]) return;
    request.isKept = true;
    this.requests.push(request);
  }

  /** Keep a line that the timeline has taken, from the first arrival to the last end. */
  keep({ arrival, iteration, end }) {
    const has = (n) => this.requests.some((each) => each.n === n);
    if (arrival && has(arrival.n)) this.lines.arrivals.push(arrival);
    if (end && has(end.n)) this.lines.ends.push(end);
    if (iteration && this.hasBegun && this.lines.ends.length < this.lengths.length) this.lines.iterations.push(iteration);
    if (end && this.isOver) this.figures ??= this.measure();
  }

  /** The rates of the burst, its most pages, its fullest batch, and the seconds of an answer. */
  measure() {
    const columns = this.timeline.columnsFrom(this.first, this.first + this.elapsed);
    const free = Math.min(...columns.map((each) => each.free_pages));
    const seconds = secondsOf(this.lines, this.means.there);
    return { rates: this.timeline.ratesOf(columns), free, fullest: fullestOf(columns), seconds };
  }

  /** The burst as one HTML file. */
  async page() {
    return (await post("playground/page", this.lines)).blob();
  }

  get hasBegun() {
    return this.requests.length > 0;
  }

  get first() {
    return this.requests[0].begin;
  }

  get isOver() {
    return this.requests.length === this.lengths.length && this.requests.every((each) => each.state === "ended");
  }

  /** The number of iterations since the burst began, up to its end. */
  get elapsed() {
    const last = this.isOver ? Math.max(...this.requests.map((each) => each.end)) + 1 : this.timeline.next;
    return last - this.first;
  }

  get count() {
    return Math.max(this.replay.total, this.elapsed);
  }

  view() {
    const { first } = this;
    const until = first + this.elapsed;
    const { count } = this;
    return { first, count, until, end: first + count, label: (column) => column - first, requests: this.requests };
  }

  /** Draw the replay as far as the engine is, and whole after the end. */
  drawReplay(target, theme) {
    const until = this.isOver ? this.replay.total : Math.min(this.elapsed, this.replay.total);
    const rows = this.replay.rows.map((row, i) => {
      return { ...lookOf(this.requests[i]?.n ?? i), spans: spansOf(row), open: null, end: row.end - 1 };
    });
    const scale = evenScale(0, (target.width - LABEL - 4) / this.count, (column) => column);
    drawChart(target, rows, { scale, until, end: this.count, layout: layoutOf(target, rows.length), cursor: null }, theme);
  }

  /** Iterations until the mean answer, here and under request-level scheduling. */
  get means() {
    const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;
    const here = mean(this.requests.map((each) => each.end + 1 - this.first));
    return { here, there: mean(this.replay.rows.map((each) => each.end)) };
  }

  /** The result in one line. */
  headline() {
    if (!this.hasBegun) return "The burst is on its way.";
    const { total } = this.replay;
    if (!this.figures) return `Iteration ${this.elapsed}; request-level scheduling needs ${total}.`;
    const { here, there } = this.figures.seconds;
    return `An answer after ${timeText(here)} instead of ${timeText(there)} (estimated)`;
  }

  /** How the headline was computed. */
  basis() {
    if (!this.figures) return "";
    const share = shareText(this.elapsed, this.replay.total);
    return `Means of this burst, in ${share} of request-level scheduling: these are computed in this page, at ${timeText(this.figures.seconds.pace)} each.`;
  }

  text() {
    const count = this.lengths.length;
    const fits = count > this.maxBatch ? "" : " All fit into it, so none takes the place of another.";
    const head = `${count} requests (seed ${this.seed}), at most ${this.maxBatch} in a batch.${fits} `;
    if (!this.isOver) return head;
    const { here, there } = this.means;
    return (
      `${head}This engine: ${this.elapsed} iterations, an answer after ${here.toFixed(0)} on average. ` +
      `Request-level scheduling: ${this.replay.total} iterations, an answer after ${there.toFixed(0)}.`
    );
  }
}

/** The size and the seed of the burst in the page's address; null if it has none. */
export function burstInAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const [count, seed] = [Number(given.get("burst")), Number(given.get("seed"))];
  const isBurst = Number.isInteger(count) && count > 0 && count <= MOST && Number.isSafeInteger(seed);
  return isBurst ? { count, seed } : null;
}

export function putInAddress({ lengths, seed }) {
  history.replaceState(null, "", `${location.pathname}${location.search}#burst=${lengths.length}&seed=${seed}`);
}
