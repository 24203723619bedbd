// Reads of decisions in the timeline: the requests of one call are one row. Nothing here knows the page.

const WORK = ["chunk", "increment", "repeat"];

/** The requests of each row, in order: all reads of a call, or one other request. */
export function grouped(requests) {
  const rows = new Map();
  for (const request of requests) {
    const row = rows.get(request.call);
    if (row) row.push(request);
    else rows.set(request.call, [request]);
  }
  return [...rows.values()];
}

/** The spans of a row: in an iteration the tokens of all working reads, or the state of the first one. */
export function joined(parts) {
  if (parts.length === 1) return parts[0];
  const columns = new Map();
  for (const { kind, first, last, start, tokens } of parts.flat()) {
    for (let column = first; column <= last; column++) {
      add(columns, { kind, first: column, last: column, start, tokens: tokens / (last - first + 1) });
    }
  }
  const row = [];
  for (const span of [...columns.values()].sort((one, other) => one.first - other.first)) {
    const before = row.at(-1);
    const goesOn = before && before.kind === span.kind && before.last === span.first - 1;
    if (goesOn && !WORK.includes(span.kind)) before.last = span.last;
    else row.push(span);
  }
  return row;
}

function add(columns, span) {
  const known = columns.get(span.first);
  const isWork = WORK.includes(span.kind);
  if (!known || (isWork && !WORK.includes(known.kind))) columns.set(span.first, span);
  else if (isWork) {
    if (WORK.indexOf(span.kind) < WORK.indexOf(known.kind)) known.kind = span.kind;
    known.start = Math.min(known.start, span.start);
    known.tokens += span.tokens;
  }
}

/** The tokens that reads of one call need: the state once, and each question. */
export const tokensOf = (reads) => reads.reduce((sum, { prompt, shared }) => sum + prompt - shared, reads[0].shared);

/** The reads of the newest call since `since` that has ended and needed so many tokens; null if there is none. */
export function callOf(requests, since, tokens) {
  const reads = grouped([...requests].filter((each) => each.n >= since && each.shared));
  return reads.findLast((each) => tokensOf(each) === tokens && each.every(({ state }) => state === "ended")) ?? null;
}
