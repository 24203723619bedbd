// Calls of Python in a worker, with a limit of time: an endless loop costs the worker, and never the page.

export const LIMIT_SECONDS = 20;

export class Python {
  /** onState: called with "loading", "ready", "running" or "failed", and with the reason of a failure. */
  constructor(onState) {
    this.onState = onState;
    this.pending = null; // {id, settle, timer}
    this.number = 0;
    this.start();
  }

  start() {
    this.onState("loading");
    this.worker = new Worker("worker.js", { type: "module" });
    this.worker.onmessage = ({ data }) => this.take(data);
    this.worker.onerror = (event) => this.fail(event.message || "the worker ended");
    this.ready = new Promise((resolve) => (this.markReady = resolve));
  }

  take(data) {
    if (data.ready) {
      this.onState("ready");
      this.markReady();
    } else if (data.failed) {
      this.fail(data.failed);
    } else if (this.pending && data.id === this.pending.id) {
      this.onState("ready");
      this.settle("fault" in data ? { fault: data.fault } : { answer: data.answer });
    }
  }

  fail(reason) {
    this.onState("failed", reason);
    this.settle({ fault: reason });
  }

  settle(result) {
    const { pending } = this;
    if (!pending) return;
    clearTimeout(pending.timer);
    this.pending = null;
    pending.settle(result);
  }

  /** The answer {answer} or {fault} of a function of browser.py. The time counts from when Python is loaded. */
  async call(name, asked) {
    await this.ready;
    if (this.pending) return { fault: "another run has not ended" };
    const id = ++this.number;
    this.onState("running");
    return new Promise((settle) => {
      const timer = setTimeout(() => this.stop(`stopped after ${LIMIT_SECONDS} s, the limit of a run`), 1000 * LIMIT_SECONDS);
      this.pending = { id, settle, timer };
      this.worker.postMessage({ id, call: name, asked });
    });
  }

  /** End what runs. Python is loaded again at once. */
  stop(reason = "stopped") {
    if (!this.pending) return;
    this.worker.terminate();
    this.settle({ fault: reason });
    this.start();
  }
}
