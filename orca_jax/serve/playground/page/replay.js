// A burst of requests, and the same burst under request-level scheduling (the baseline of the paper, section 6.2).

/** Lengths [prompt, generated] of mixed requests: the same numbers for the same seed. */
export function burstOf(count, context, seed) {
  const draw = randomNumbers(seed);
  const most = Math.max(2, Math.floor(context / 4));
  const between = (low, high) => low + Math.floor(draw() * (high - low + 1));
  const longest = Math.min(96, most);
  return Array.from({ length: count }, () => [
    between(Math.min(4, longest), longest),
    // Most answers are short and some are long, as in real traffic.
    draw() < 0.75 ? between(1, Math.min(24, most)) : between(Math.min(48, most), Math.min(112, most)),
  ]);
}

/**
 * The iterations of each request [prompt, generated] if up to `maxBatch` of them, in order, run as one batch.
 *
 * A batch runs until its longest member ends. Its first iteration takes as many tokens from each member as the shortest
 * prompt has; then each takes one token per iteration. So a member works for `prompt - shortest + generated`
 * iterations, keeps its place until the batch ends, and is returned only then.
 *
 * Returns {rows, total}: for each request `begin`, `shortest` (its tokens in the first iteration), `chunks` (the
 * iterations after it that process the prompt), `done` and `end`; and the number of all iterations.
 */
export function requestLevel(requests, maxBatch) {
  const rows = [];
  let begin = 0;
  for (let i = 0; i < requests.length; i += maxBatch) {
    const batch = requests.slice(i, i + maxBatch);
    const shortest = Math.min(...batch.map(([prompt]) => prompt));
    const lengths = batch.map(([prompt, generated]) => prompt - shortest + generated);
    const end = begin + Math.max(...lengths);
    batch.forEach(([prompt], j) => {
      const chunks = prompt - shortest; // iterations after the first that process the prompt
      rows.push({ begin, shortest, chunks, done: begin + lengths[j], end });
    });
    begin = end;
  }
  return { rows, total: begin };
}

/** The same as spans for the drawing. */
export function spansOf(row) {
  const { begin, shortest, chunks, done, end } = row;
  const spans = [];
  const add = (kind, first, last, tokens) => first <= last && spans.push({ kind, first, last, tokens });
  add("waiting", 0, begin - 1, 0);
  add("chunk", begin, begin, shortest);
  add("chunk", begin + 1, begin + chunks, chunks);
  add("increment", begin + chunks + 1, done - 1, 1);
  add("repeat", done, end - 1, 1);
  return spans;
}

/** Numbers in [0, 1) by mulberry32. */
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}
