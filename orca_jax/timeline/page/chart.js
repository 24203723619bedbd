// A chart of requests by iteration, with a cell that a pointer, a finger or the keys choose.

import { cellAt, drawChart, layoutOf, prepare } from "./draw.js";

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] };

export class Chart {
  /**
   * onChoice: called with the chosen cell {n, column} or null, and with true if a key or a button chose it.
   * keeps: true if a cell stays chosen when the pointer leaves the chart.
   */
  constructor(canvas, onChoice, keeps = false) {
    this.canvas = canvas;
    this.onChoice = onChoice;
    this.chosen = null;
    this.isPinned = false; // by a click, a touch or a key: it stays while the pointer moves
    this.view = null; // what is drawn
    this.rows = [];
    canvas.addEventListener("pointermove", (event) => event.pointerType === "mouse" && !this.isPinned && this.point(event));
    if (!keeps) canvas.addEventListener("pointerleave", () => !this.isPinned && this.chosen && this.choose(null));
    canvas.addEventListener("click", (event) => {
      this.isPinned = true;
      this.point(event);
    });
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  /** The size of the canvas, if it is shown. */
  prepare() {
    return prepare(this.canvas);
  }

  /**
   * Draw rows; each has the number `n` of its request, and else what `drawChart` needs.
   *
   * view: {scale, until, bars, size, from}: `size` has the options of `layoutOf`, and `from` is the first column to choose.
   */
  draw(target, rows, view, theme) {
    const layout = layoutOf(target, rows.length, view.size);
    const row = this.chosen ? rows.findIndex((each) => each.n === this.chosen.n) : -1;
    const isSeen = row >= 0 && this.chosen.column < view.until && view.scale.right(this.chosen.column) > layout.left;
    this.rows = rows;
    this.view = { ...view, layout, cursor: isSeen ? { row, column: this.chosen.column } : null };
    drawChart(target, rows, this.view, theme);
  }

  point({ offsetX, offsetY }) {
    const cell = this.view && cellAt(this.view, this.rows.length, offsetX, offsetY);
    this.choose(cell && { n: this.rows[cell.row].n, column: cell.column });
  }

  choose(cell, isByKey = false) {
    this.chosen = cell;
    if (!cell) this.isPinned = false;
    this.onChoice(cell, isByKey);
  }

  press(event) {
    if (event.key === "Escape") this.choose(null);
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    this.move(...step);
  }

  /** Move the chosen cell by rows and columns; the first one is at the bottom right of what is drawn. */
  move(rows, columns) {
    if (!this.rows.length) return;
    const { scale, layout, until, from = 0 } = this.view;
    const at = (value, most, least = 0) => Math.max(least, Math.min(most, value));
    const row = this.chosen ? this.rows.findIndex((each) => each.n === this.chosen.n) : -1;
    const newRow = at((row < 0 ? layout.last : row) + rows, this.rows.length - 1);
    const column = this.chosen?.column ?? Math.min(scale.columnAt(layout.right), until - 1);
    this.isPinned = true;
    this.choose({ n: this.rows[newRow].n, column: at(column + columns, until - 1, from) }, true);
  }
}
