// The figures of a burst that has ended: seconds, rates and the fullest batch. Nothing here knows the page.

/**
 * Seconds of the mean answer, here and estimated under request-level scheduling.
 *
 * lines: {arrivals, iterations, ends} of the burst; iterations: the mean end of an answer under request-level
 * scheduling, in iterations. Nearly all of these take one token of each request, so each is estimated by `pace`, the
 * median time of an iteration of this burst without prefill.
 */
export function secondsOf({ arrivals, iterations, ends }, iterationsThere) {
  const arrived = new Map(arrivals.map(({ n, at }) => [n, at]));
  const waits = ends.map(({ n, at }) => at - arrived.get(n));
  const pace = paceOf(iterations);
  return { here: mean(waits), there: iterationsThere * pace, pace };
}

/** The median time between the results of two iterations, the later one without prefill if there are such. */
function paceOf(iterations) {
  const times = [];
  const plain = [];
  for (let i = 1; i < iterations.length; i++) {
    const seconds = iterations[i].collected - iterations[i - 1].collected;
    times.push(seconds);
    if (!iterations[i].chunks.length) plain.push(seconds);
  }
  return median(plain.length ? plain : times);
}

/** The iteration with the most requests; the first of several. */
export function fullestOf(columns) {
  return columns.reduce((best, each) => (each.members.length > (best?.members.length ?? 0) ? each : best), null);
}

/** The words of a time. */
export function timeText(seconds) {
  if (seconds >= 0.995) return `${seconds.toFixed(1)} s`;
  const ms = 1e3 * seconds;
  return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

/** The words of a count beside a larger one. */
export function shareText(count, larger) {
  const share = count / larger;
  if (share < 0.5) return "less than half of the iterations";
  if (share < 0.97) return `${Math.round(100 * share)} % of the iterations`;
  return "about all of the iterations";
}

const mean = (values) => values.reduce((sum, each) => sum + each, 0) / values.length;

function median(values) {
  if (!values.length) return 0;
  const sorted = values.toSorted((one, other) => one - other);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
