// The stream of iterations: connects, connects again after an end, and passes each line on.

import { call, events } from "./api.js";

const PAUSES = [500, 1000, 2000, 5000]; // milliseconds before the next attempt

export class IterationStream {
  /**
   * onLines: called with the parsed lines of an event; onDropped: with a number of lost lines;
   * onState: with "live", "paused" or "no connection".
   */
  constructor({ onLines, onDropped, onState }) {
    Object.assign(this, { onLines, onDropped, onState });
    this.abort = null;
  }

  get isOn() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
    this.onState("paused");
  }

  async start() {
    if (this.isOn) return;
    const abort = (this.abort = new AbortController());
    for (let failures = 0; !abort.signal.aborted; ) {
      try {
        const response = await call("playground/iterations", { signal: abort.signal });
        this.onState("live");
        failures = 0;
        for await (const { event, data } of events(response)) this.take(event, data);
      } catch (error) {
        if (abort.signal.aborted) return;
        console.info(`the stream of iterations has ended: ${error.message}`);
      }
      if (abort.signal.aborted) return;
      this.onState("no connection");
      await new Promise((resolve) => setTimeout(resolve, PAUSES[Math.min(failures++, PAUSES.length - 1)]));
    }
  }

  take(event, data) {
    if (event === "dropped") this.onDropped(Number(data));
    else this.onLines(data.split("\n").map((line) => JSON.parse(line)));
  }
}
