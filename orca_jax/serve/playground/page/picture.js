// A picture of a burst: both charts, the headline, the model and the machine.

import { LABEL } from "./draw.js";
import { evenScale } from "./scale.js";

const [WIDTH, HEIGHT, SCALE, MARGIN] = [1200, 760, 2, 24];
const CHART = { width: WIDTH - 2 * MARGIN, height: 268 };

/**
 * Draw the picture; returns its canvas.
 *
 * drawLive(target, view): draws the rows of the engine; about: lines of text below the headline.
 */
export function pictureOf(burst, drawLive, about, theme) {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: WIDTH * SCALE, height: HEIGHT * SCALE });
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  context.fillStyle = theme.page;
  context.fillRect(0, 0, WIDTH, HEIGHT);
  const write = (text, y, font, color) => {
    Object.assign(context, { font: `${font} system-ui, sans-serif`, fillStyle: color, textAlign: "left", textBaseline: "alphabetic" });
    context.fillText(text, MARGIN, y, CHART.width);
  };
  const chart = (title, y, draw) => {
    write(title, y, "600 15px", theme.text);
    context.save();
    context.translate(MARGIN, y + 10);
    context.fillStyle = theme.card;
    context.fillRect(0, 0, CHART.width, CHART.height);
    draw({ context, ...CHART });
    context.restore();
  };
  write(burst.headline(), 44, "700 28px", theme.text);
  about.forEach((line, i) => write(line, 70 + 20 * i, "14px", theme.muted));
  const { first, count, label } = burst.view();
  const scale = evenScale(first, (CHART.width - LABEL - 4) / count, label);
  chart(burst.title, 140, (target) => drawLive(target, scale));
  chart("Request-level scheduling, computed in the page", 450, (target) => burst.drawReplay(target, theme));
  return canvas;
}
