// One burst: its requests in the engine, and the same requests under request-level scheduling.

import { post } from "./api.js";
import { drawChart, LABEL, layoutOf, lookOf, prepare } from "./draw.js";
import { burstOf, requestLevel, spansOf } from "./replay.js";
import { evenScale } from "./scale.js";

let seed = 1;

export class Burst {
  constructor(count, settings, timeline) {
    this.timeline = timeline;
    this.lengths = burstOf(count, settings.context, seed++);
    this.requests = []; // those of the timeline, as they arrive
    this.maxBatch = timeline.engine?.num_rows ?? settings.max_num_seqs;
    this.replay = requestLevel(this.lengths, this.maxBatch);
    for (const request of timeline.requests.values()) request.isKept = false;
    timeline.onArrival = (request) => this.claim(request);
  }

  /** Send the burst; resolves when all its requests have ended. */
  async run() {
    await post("playground/burst", { requests: this.lengths, seed });
  }

  /** Requests have no names here: those of the burst are recognised by their lengths, in order. */
  claim(request) {
    const expected = this.lengths[this.requests.length];
    if (!expected || request.prompt !== expected[0] || request.limit !== expected[1]) return;
    request.isKept = true;
    this.requests.push(request);
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
    return { first, count: this.count, until, label: (column) => column - first, requests: this.requests };
  }

  /** Draw the replay as far as the engine is, and whole after the end. */
  drawReplay(canvas, theme) {
    const target = prepare(canvas);
    if (!target) return;
    const until = this.isOver ? this.replay.total : Math.min(this.elapsed, this.replay.total);
    const rows = this.replay.rows.map((row, i) => {
      return { ...lookOf(this.requests[i]?.n ?? i), spans: spansOf(row), open: null, end: row.end - 1 };
    });
    const scale = evenScale(0, (target.width - LABEL - 4) / this.count, (column) => column);
    drawChart(target, rows, { scale, until, layout: layoutOf(target, rows.length), cursor: null }, theme);
  }

  text() {
    const { rows, total } = this.replay;
    const head = `${this.lengths.length} requests, at most ${this.maxBatch} in a batch. `;
    if (!this.hasBegun) return `${head}They are on their way.`;
    if (!this.isOver) return `${head}Iteration ${this.elapsed}; request-level scheduling takes ${total}.`;
    const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;
    const here = mean(this.requests.map((each) => each.end + 1 - this.first));
    const there = mean(rows.map((each) => each.end));
    const times = (one, other) => `${(one / other).toFixed(1)} times`;
    return (
      `${head}Iteration-level scheduling: ${this.elapsed} iterations, an answer after ${here.toFixed(0)} on average. ` +
      `Request-level scheduling: ${total} iterations (${times(total, this.elapsed)} as many), ` +
      `an answer after ${there.toFixed(0)} (${times(there, here)} as late).`
    );
  }
}
