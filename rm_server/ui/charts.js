// Charts as SVG, drawn for the width they have, so that their text keeps its size on a narrow screen.

import { h, number, percent, svg, whole } from "./dom.js";
import { marks, ticks } from "./stats.js";

const LEFT = 44;
const BOTTOM = 22;

// A box that draws again whenever its width changes. draw(width) gives an SVG element.
export function responsive(draw) {
  const box = h("div");
  const redraw = () => {
    const width = box.clientWidth;
    if (width > 0) box.replaceChildren(draw(width));
  };
  let seen = 0;
  new ResizeObserver(() => {
    if (box.clientWidth === seen) return;
    seen = box.clientWidth;
    redraw();
  }).observe(box);
  return { box, redraw };
}

function frame(width, height, label, parts) {
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, parts);
}

const text = (x, y, content, anchor = "middle") => svg("text", { x, y, "text-anchor": anchor }, content);
const line = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });

// bins: {edges [n + 1], counts [n]}; mean, std of the checkpoint where it has any.
export function histogram(bins, mean, std) {
  return (width) => {
    const height = 220;
    const { edges, counts } = bins;
    const most = Math.max(...counts, 1);
    const x = (value) => LEFT + ((value - edges[0]) / (edges.at(-1) - edges[0])) * (width - LEFT - 10);
    const y = (count) => height - BOTTOM - (count / most) * (height - BOTTOM - 14);
    const parts = [];
    const inside = (value) => Math.min(Math.max(value, edges[0]), edges.at(-1));
    if (std) parts.push(svg("rect", { class: "band", x: x(inside(mean - std)), y: 14, width: x(inside(mean + std)) - x(inside(mean - std)), height: height - BOTTOM - 14 }));
    for (const count of ticks(0, most, 4)) if (Number.isInteger(count)) parts.push(line(LEFT, y(count), width - 10, y(count), "grid"), text(LEFT - 6, y(count) + 4, whole(count), "end"));
    counts.forEach((count, i) => parts.push(svg("rect", { class: "bar", x: x(edges[i]) + 0.5, y: y(count), width: Math.max(x(edges[i + 1]) - x(edges[i]) - 1, 0.5), height: height - BOTTOM - y(count) })));
    if (std) parts.push(line(x(mean), 14, x(mean), height - BOTTOM, "mark"));
    for (const value of ticks(edges[0], edges.at(-1), Math.max(4, Math.floor(width / 90)))) parts.push(text(x(value), height - 6, short(value)));
    return frame(width, height, `Histogram of ${whole(counts.reduce((a, b) => a + b, 0))} rewards from ${number(edges[0])} to ${number(edges.at(-1))}`, parts);
  };
}

const short = (value) => String(Number(value.toPrecision(4))).replace("-", "−");

// points: [seconds ago, value or null], oldest first.
export function series(label, points, format, floor = null) {
  return (width) => {
    const height = 130;
    const values = points.map(([, value]) => value).filter(Number.isFinite);
    let low = Math.min(...values, floor ?? Infinity);
    let high = Math.max(...values, floor ?? -Infinity);
    if (!values.length) [low, high] = [0, 1];
    if (high - low < 1e-9) [low, high] = floor === null ? [low - 0.5, high + 0.5] : [low, low + 1];
    const span = Math.max(60, ...points.map(([ago]) => ago));
    const x = (ago) => width - 10 - (ago / span) * (width - LEFT - 20);
    const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - BOTTOM - 12);
    const parts = [];
    for (const value of marks(low, high)) parts.push(line(LEFT, y(value), width - 10, y(value), "grid"), text(LEFT - 6, y(value) + 4, format(value), "end"));
    parts.push(text(LEFT, height - 6, span >= 120 ? `${Math.round(span / 60)} min ago` : `${Math.round(span)} s ago`, "start"), text(width - 10, height - 6, "now", "end"));
    let path = "";
    let pen = "M";
    for (const [ago, value] of points) {
      if (!Number.isFinite(value)) { pen = "M"; continue; }
      path += `${pen}${x(ago).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
    if (path) parts.push(svg("path", { class: "line", d: path }));
    return frame(width, height, `${label}: now ${values.length ? format(values.at(-1)) : "unknown"}`, parts);
  };
}

export function calibrationChart(bins) {
  const { box } = responsive((width) => {
    const height = 240;
    const x = (share) => LEFT + ((share - 0.5) / 0.5) * (width - LEFT - 26);
    const y = (share) => height - BOTTOM - share * (height - BOTTOM - 12);
    const most = Math.max(...bins.map(({ pairs }) => pairs));
    const parts = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => [line(LEFT, y(share), width - 26, y(share), "grid"), text(LEFT - 6, y(share) + 4, percent(share), "end")]);
    parts.push(...[0.5, 0.6, 0.7, 0.8, 0.9, 1].map((share) => text(x(share), height - 6, percent(share))));
    parts.push(line(x(0.5), y(0.5), x(1), y(1), "ideal"));
    parts.push(svg("path", { class: "line", d: bins.map((bin, i) => `${i ? "L" : "M"}${x(bin.confidence)} ${y(bin.accuracy)}`).join("") }));
    parts.push(...bins.map((bin) => svg("circle", { class: "dot", cx: x(bin.confidence), cy: y(bin.accuracy), r: 3 + 5 * Math.sqrt(bin.pairs / most) })));
    return frame(width, height, "How often the favourite is the chosen answer, by the probability it was given; the dashed line is perfect", parts);
  });
  return box;
}
