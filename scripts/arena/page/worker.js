// Runs Python. The page ends this worker when a call takes too long, and starts another one.

import { loadPyodide } from "./pyodide/pyodide.mjs";

async function start() {
  const [python, modules] = await Promise.all([
    loadPyodide(),
    fetch("modules.zip").then((answer) => answer.arrayBuffer()),
  ]);
  python.unpackArchive(modules, "zip");
  return python.pyimport("arena");
}

const starting = start();
starting.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ failed: error.message }),
);

onmessage = async ({ data: { id, call, asked } }) => {
  const arena = await starting;
  try {
    postMessage({ id, answer: JSON.parse(arena[call](JSON.stringify(asked))) });
  } catch (error) {
    // The last line of a traceback is the exception; a fault of the reader has a message of its own.
    const fault = error.message.match(/^arena\.Fault: ([^]*)$/m);
    postMessage({ id, fault: fault ? fault[1].trim() : error.message });
  }
};
