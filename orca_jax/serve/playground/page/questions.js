// The questions of the field for decisions, and the words of their iterations. Nothing here knows the page.

/** The questions of a text, one in each line: "text", "text | option | option" or "text | lowest < higher < highest". */
export function questionsOf(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  return lines.map((line, index) => {
    const [question, ...options] = line.split("|").map((part) => part.trim());
    const given = { id: `${index + 1}`, question };
    if (!options.length) return { ...given, type: "yes_no" };
    const levels = options[0].split("<").map((level) => level.trim());
    if (options.length === 1 && levels.length > 1) return { ...given, type: "score", levels };
    return { ...given, type: "choice", options: options.map((name) => ({ name })) };
  });
}

/** The words of the iterations in which reads ended. */
export function endsText(ends) {
  if (!ends) return "";
  const [first, ...others] = ends;
  if (!others.length) return `All ran in iteration ${first.iteration}.`;
  const parts = ends.map(({ iteration, count }) => `${count} in ${iteration}`);
  return `Answers by iteration: ${parts.join(", ")}; those after the first one waited for its state.`;
}
