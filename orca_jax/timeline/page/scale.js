// The places of columns, which are iterations, on an axis: columns of one width, or columns between their times.

import { LABEL } from "./draw.js";

const GRID_COLUMN = 5; // pixels; narrower columns are not separated
const TICK = 74; // pixels between two numbers, at least
const TEXT = 40; // pixels of a number with its text below

/** The smallest 1, 2 or 5 times a power of ten that is at least `least`. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((each) => each * power >= least * (1 - 1e-9)) ?? 10);
}

/**
 * Columns of one width. The column `first` begins at the left edge; it has a fraction while a chart is scrolled.
 *
 * label(column): the number of a column, or null; below(column): a text below it.
 */
export function evenScale(first, width, label, below = null) {
  return {
    hasGrid: width >= GRID_COLUMN,
    left: (column) => LABEL + (column - first) * width,
    right: (column) => LABEL + (column + 1 - first) * width,
    columnAt: (x) => Math.floor(first + (x - LABEL) / width),
    ticks({ left, right }, until) {
      const ticks = [];
      const step = Math.max(1, niceStep(TICK / width));
      for (let column = this.columnAt(left); column < Math.min(this.columnAt(right - TEXT), until); column++) {
        const number = label(column);
        if (number === null || number % step || column < first) continue;
        ticks.push({ x: this.left(column), texts: below ? [number, below(column)] : [number] });
      }
      return ticks;
    },
  };
}

/** Columns from `begins[column]` to `ends[column]`, in seconds; the left edge is at `start`. */
export function timeScale(begins, ends, start, perSecond) {
  const place = (seconds) => LABEL + (seconds - start) * perSecond;
  return {
    hasGrid: false,
    left: (column) => place(begins[column]),
    right: (column) => place(ends[column]),
    columnAt(x) {
      const at = start + (x - LABEL) / perSecond;
      let [low, high] = [0, begins.length];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (begins[middle] <= at) low = middle + 1;
        else high = middle;
      }
      return Math.max(0, low - 1);
    },
    ticks({ left, right }) {
      const ticks = [];
      const step = niceStep(TICK / perSecond);
      const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
      for (let i = Math.ceil((start + (left - LABEL) / perSecond) / step - 1e-9); place(i * step) < right - TEXT; i++) {
        ticks.push({ x: place(i * step), texts: [`${(i * step).toFixed(decimals)} s`] });
      }
      return ticks;
    },
  };
}
