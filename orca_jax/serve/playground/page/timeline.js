// The requests and iterations of an engine, from the lines of its timeline. Nothing here knows the page.

const KEPT = 1200; // columns; a column is an iteration
const NO_RATES = { tokens: 0, device: 0, host: 0 };

class Request {
  constructor(n, prompt, limit, column) {
    this.n = n;
    this.call = n; // of reads of decisions: the number of the first read of the call
    this.shared = 0; // tokens that these reads begin with
    this.prompt = prompt; // tokens; null if the request came before the watch and was not listed
    this.limit = limit; // most generated tokens
    this.state = "waiting"; // waiting, running, preempted, ended
    this.since = column; // the first column of a wait that has not ended
    this.computed = 0;
    this.generated = 0;
    this.iterations = 0;
    this.spans = []; // {kind, first, last, tokens, start}, in order
    this.begin = column;
    this.end = null; // the column of its last iteration
    this.reason = null;
    this.times = []; // of the first and of the last token, in the engine's seconds
  }

  /** Tokens per second after the first one; null for fewer than two. */
  get rate() {
    const [first, last] = this.times;
    return last > first ? (this.generated - 1) / (last - first) : null;
  }

  /** Count new tokens. */
  write(count, time) {
    this.generated += count;
    this.times = [this.times[0] ?? time, time];
  }

  /** Take part in an iteration. */
  work(kind, column, start, tokens) {
    if (this.state === "waiting" || this.state === "preempted") {
      if (this.since < column) this.spans.push({ kind: this.state, first: this.since, last: column - 1, tokens: 0, start: 0 });
      this.state = "running";
    }
    const last = this.spans.at(-1);
    // An increment joins those before it if it is the next token, and has no proposals (speculation).
    const isNext = kind !== "increment" || (tokens === 1 && last?.tokens === column - last?.first && start === last.start + last.tokens);
    if (kind !== "chunk" && last?.kind === kind && last.last === column - 1 && isNext) {
      last.last = column;
      last.tokens += tokens;
    } else {
      this.spans.push({ kind, first: column, last: column, tokens, start });
    }
    this.computed = start + tokens;
    this.iterations += 1;
    if (this.end !== null) this.end = column;
  }
}

export class Timeline {
  constructor() {
    this.onArrival = () => {};
    this.clear();
  }

  clear() {
    this.requests = new Map(); // by number, in order of arrival
    this.columns = []; // the last iterations; the last one has the number `next - 1`
    this.next = 0;
    this.engine = null; // the settings of the last `start`
    this.dropped = 0;
    this.numArrived = 0; // one more than the highest number of a request
  }

  get lastColumn() {
    return this.columns.at(-1) ?? null;
  }

  column(index) {
    return this.columns[index - this.next + this.columns.length] ?? null;
  }

  /** Take one line: an object with one of the keys `start`, `arrival`, `iteration` and `end`. */
  take(line) {
    if (line.iteration) this.takeIteration(line.iteration);
    else if (line.arrival) this.takeArrival(line.arrival);
    else if (line.end) this.takeEnd(line.end);
    else if (line.start) this.takeStart(line.start);
  }

  takeStart(start) {
    if (start.num_arrived < this.numArrived) this.clear(); // another engine, which counts from 0
    this.engine = start;
    const listed = new Set();
    for (const each of start.requests) {
      listed.add(each.n);
      let request = this.requests.get(each.n);
      if (!request) {
        request = this.add(each.n, each.prompt, each.max_tokens);
        if (each.has_row) request.state = "running";
      }
      request.computed = each.computed;
      request.generated = each.generated;
    }
    for (const request of this.requests.values()) {
      if (request.state !== "ended" && !listed.has(request.n)) this.finish(request, "not seen");
    }
  }

  takeArrival({ n, prompt, max_tokens, call, shared }) {
    const request = this.add(n, prompt, max_tokens);
    Object.assign(request, { call: call ?? n, shared: shared ?? 0 });
    this.onArrival(request);
  }

  takeIteration(record) {
    const column = this.next++;
    const members = [];
    const work = (kind, n, start, tokens, samples) => {
      const request = this.requests.get(n) ?? this.add(n, null, null);
      const isOver = request.state === "ended"; // its last token was already drawn when this iteration was submitted
      request.work(isOver ? "repeat" : kind, column, start, tokens);
      if (samples && !isOver) request.write(1, record.collected);
      members.push({ n, kind: isOver ? "repeat" : kind, tokens, start });
    };
    const proposed = new Map(record.proposed ?? []);
    for (const [n, start] of record.increments) work("increment", n, start, 1 + (proposed.get(n) ?? 0), !record.told);
    for (const [n, start, tokens, samples] of record.chunks) work("chunk", n, start, tokens, samples && !record.told);
    for (const [n, start, tokens] of record.repeats) work("repeat", n, start, tokens, false);
    for (const [n, count] of record.told ?? []) {
      const request = this.requests.get(n);
      if (!request) continue;
      request.write(count, record.collected);
      if (proposed.has(n)) request.computed += count - 1 - proposed.get(n); // the other proposals were wrong
    }
    for (const n of record.preempted) {
      const request = this.requests.get(n);
      if (request && request.state !== "ended") Object.assign(request, { state: "preempted", since: column, computed: 0 });
    }
    members.sort((one, other) => one.n - other.n);
    const sampled = record.told
      ? record.told.reduce((sum, [, count]) => sum + count, 0)
      : record.increments.length + record.chunks.filter((each) => each[3]).length;
    this.columns.push({ ...record, members, sampled });
    if (this.columns.length > KEPT + 256) this.prune(); // rarely: it walks all requests
  }

  takeEnd({ n, reason, generated }) {
    const request = this.requests.get(n);
    if (!request) return;
    request.generated = generated;
    this.finish(request, reason);
  }

  finish(request, reason) {
    if (request.state === "waiting" || request.state === "preempted") {
      request.spans.push({ kind: request.state, first: request.since, last: this.next - 1, tokens: 0, start: 0 });
    }
    request.state = "ended";
    request.reason = reason;
    const last = request.spans.at(-1);
    request.end = last ? last.last : this.next - 1;
  }

  add(n, prompt, limit) {
    const request = new Request(n, prompt, limit, this.next);
    this.requests.set(n, request);
    this.numArrived = Math.max(this.numArrived, n + 1);
    return request;
  }

  /** Forget columns, and requests that ended before them. */
  prune() {
    this.columns.splice(0, this.columns.length - KEPT);
    const first = this.next - this.columns.length;
    for (const request of this.requests.values()) {
      if (request.state === "ended" && request.end < first && !request.isKept) this.requests.delete(request.n);
      else if (request.spans[0]?.last < first && !request.isKept) {
        request.spans = request.spans.filter((span) => span.last >= first);
      }
    }
  }

  /** Number of requests in a state. */
  count(state) {
    let count = 0;
    for (const request of this.requests.values()) count += request.state === state;
    return count;
  }

  /** The columns from `first` on, up to `until`, that are still known. */
  columnsFrom(first, until) {
    const begin = this.next - this.columns.length;
    return this.columns.slice(Math.max(0, first - begin), Math.max(0, until - begin));
  }

  /** Means of the iterations in the last `seconds` of the engine's time. */
  rates(seconds) {
    const last = this.lastColumn;
    if (!last) return NO_RATES;
    const begin = this.columns.findLastIndex((each) => each.collected < last.collected - seconds) + 1;
    return this.ratesOf(this.columns.slice(begin), this.columns[begin - 1]);
  }

  /** Means of some iterations in a row; tokens by second of work. `before`: the iteration before them. */
  ratesOf(columns, before = null) {
    if (!columns.length) return NO_RATES;
    let tokens = 0;
    let device = 0;
    let host = 0;
    let busy = 0;
    let collected = before?.collected ?? 0;
    for (const each of columns) {
      tokens += each.sampled;
      device += each.device;
      host += each.planned - each.selected + each.update;
      busy += each.collected - Math.max(each.planned, collected);
      collected = each.collected;
    }
    const count = columns.length;
    return { tokens: tokens / Math.max(busy, 1e-6), device: (1e3 * device) / count, host: (1e3 * host) / count };
  }
}
