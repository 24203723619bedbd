// Small helpers for the document. All texts go through text nodes.

export const find = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const button = (text, onclick, attributes = {}) => element("button", { type: "button", onclick, ...attributes }, text);

/** Show a page of runs in a frame, which is as high as the page. */
export function showPage(frame, html) {
  frame.hidden = false;
  frame.onload = () => {
    const { body } = frame.contentDocument;
    new frame.contentWindow.ResizeObserver(() => (frame.style.height = `${body.scrollHeight + 2}px`)).observe(body);
  };
  frame.srcdoc = html;
}
