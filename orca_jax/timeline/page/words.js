// The texts of cells and batches.

export const counted = (count, name, names = `${name}s`) => `${count.toLocaleString("en")} ${count === 1 ? name : names}`;

const TEXTS = {
  chunk: ({ tokens, start }) => `prefill (initiation), ${counted(tokens, "token")} from position ${start}`,
  increment: ({ start, first, last, tokens }, column) =>
    tokens > last - first + 1
      ? `increment, one generated token at position ${start} and ${tokens - 1} proposed ones after it`
      : `increment, one generated token at position ${start + column - first}`,
  repeat: () => "ended, and still in the batch",
  waiting: () => "waiting for admission",
  preempted: () => "preempted, and waiting again",
};

/** The work in a column of a span; null: no span. */
export const spanText = (span, column) => (span ? TEXTS[span.kind](span, column) : "not in the batch");

/** The members [{kind}] of an iteration. */
export function batchText(iteration, tokens, members) {
  const of = (kind) => members.filter((each) => each.kind === kind).length;
  const [chunks, increments, repeats] = [of("chunk"), of("increment"), of("repeat")];
  const parts = [];
  if (increments) parts.push(counted(increments, "increment"));
  if (chunks) parts.push(`${counted(chunks, "chunk")} of prefill`);
  if (repeats) parts.push(counted(repeats, "ended request"));
  return `iteration ${iteration}: ${counted(tokens, "token")} of ${counted(members.length, "request")} (${parts.join(", ")})`;
}
