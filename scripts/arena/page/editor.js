// A field for Python: indentation by the keyboard, and what was written is kept in this browser.

const INDENT = "    ";

/** Make an editor of a textarea. `load(name, text)` shows the reader's version of a text, or the text itself. */
export function editor(field, onChange = () => {}) {
  let [key, original] = ["", ""];
  const fit = () => (field.rows = Math.min(30, Math.max(8, field.value.split("\n").length + 1)));
  const changed = () => {
    if (field.value === original) localStorage.removeItem(key);
    else localStorage.setItem(key, field.value);
    onChange(field.value !== original);
    fit();
  };
  const insert = (text) => {
    field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
    changed();
  };
  let leaves = false; // Escape, then Tab leaves the field
  field.addEventListener("keydown", (event) => {
    const line = field.value.slice(0, field.selectionStart).split("\n").at(-1);
    if (event.key === "Tab" && !event.shiftKey && !leaves) {
      event.preventDefault();
      insert(INDENT.slice(line.length % INDENT.length));
    }
    if (event.key === "Enter") {
      event.preventDefault();
      insert(`\n${line.match(/^ */)[0]}${line.trimEnd().endsWith(":") ? INDENT : ""}`);
    }
    leaves = event.key === "Escape";
  });
  field.addEventListener("input", changed);
  return {
    load(name, text) {
      [key, original] = [`arena: ${name}`, text];
      field.value = localStorage.getItem(key) ?? text;
      onChange(field.value !== original);
      fit();
    },
    reset() {
      field.value = original;
      changed();
    },
    get text() {
      return field.value;
    },
  };
}
