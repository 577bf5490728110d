// Token heat: where in an answer the reward moved.

import { h, number, percent, signed, svg, whole } from "./dom.js";
import { changes, level, quantile } from "./stats.js";

export function showHeat(box, answer, info, checkpoint) {
  const reads = answer.token_rewards;
  const holder = h("div");
  const modes = [["change", "change at each token"], ["level", "reward so far"]].map(([mode, name], i) =>
    h("label", { class: "beside" }, h("input", { type: "radio", name: "heat", value: mode, checked: i === 0, onchange: () => draw(mode) }), name));
  const draw = (mode) => {
    const scale = scaleOf(mode, reads, info, checkpoint);
    holder.replaceChildren(legend(mode, scale), ...reads.flatMap((read, i) => (read ? [oneAnswer(read, i, mode, scale)] : [])));
  };
  draw("change");
  box.append(h("div", { class: "card", id: "heat" }, h("h3", {}, "Token by token"),
    h("p", {}, "At each token the model was asked: had the answer ended here, what would its reward be? The last value is the answer's reward. "
      + "This is an aid to reading. The model was trained on whole answers; a value in the middle is not a reward for that token, and half a sentence often scores unlike what it will become."),
    info.recipe ? h("p", {}, "It shows the reward model's own number, before the recipe combines it with others.") : null,
    info.conservative ? h("p", {}, "It shows the mean over the heads, before their spread is taken off.") : null,
    h("fieldset", {}, h("legend", {}, "Show the"), h("div", { class: "row" }, modes)), holder));
}

function scaleOf(mode, reads, info, checkpoint) {
  const all = reads.flatMap((read) => (read ? read.rewards : [])).filter((value) => value !== null);
  if (mode === "level") {
    const hasSpread = (checkpoint.record?.num_eval ?? 0) > 0 && info.reward_std > 0;
    const middle = hasSpread ? info.reward_mean : quantile(all, 0.5);
    const reach = quantile(all.map((value) => Math.abs(value - middle)), 0.98);
    return { middle, far: hasSpread ? Math.max(2 * info.reward_std, reach * 0.5) : reach, name: hasSpread ? "the checkpoint's mean" : "the middle of these values" };
  }
  const moves = reads.flatMap((read) => (read ? beforeTheEnd(changes(read.rewards)) : [])).filter((value) => value !== null);
  return { middle: 0, far: quantile(moves.map(Math.abs), 0.98), name: "no change" };
}

// Training reads the reward at the end token alone, where it often jumps: that would set the scale for all others.
const beforeTheEnd = (moved) => (moved.length > 2 ? moved.slice(0, -1) : moved);

const classOf = (step) => (step === 0 ? "" : step > 0 ? `up${step}` : `down${-step}`);

function legend(mode, { middle, far, name }) {
  const step = (place, text) => h("span", { class: `swatch ${classOf(place)}` }, text);
  const show = mode === "change" ? signed : number;
  return h("p", { class: "row muted", id: "legend" }, h("span", { class: "heat-legend" },
    step(-5, `${show(middle - far)} or lower`), " ", step(-2, "lower"), " ", step(0, `${name}${mode === "level" ? `, ${number(middle)}` : ""}`), " ", step(2, "higher"), " ", step(5, `${show(middle + far)} or higher`)));
}

function oneAnswer(read, i, mode, scale) {
  const moved = changes(read.rewards);
  const values = mode === "change" ? moved : read.rewards;
  const id = `heat-${i + 1}`;
  const readout = h("output", { class: "readout", id: `${id}-readout` });
  const tokens = read.tokens.map((text, k) => {
    const isSpecial = /^<[|/]?[\w|]+[|]?>$/.test(text);
    return h("span", { class: `${classOf(level(values[k], scale.middle, scale.far))}${isSpecial ? " special" : ""}` }, text);
  });
  let active = tokens.length - 1;
  const point = (k, scroll = false) => {
    tokens[active].classList.remove("active");
    active = Math.max(0, Math.min(k, tokens.length - 1));
    tokens[active].classList.add("active");
    if (scroll) tokens[active].scrollIntoView({ block: "nearest" });
    const change = moved[active] === null ? "" : `, change ${signed(moved[active])}`;
    readout.textContent = `Token ${active + 1} of ${tokens.length} “${read.tokens[active].replaceAll("\n", "⏎")}”: reward ${number(read.rewards[active])}${change}`;
  };
  const keys = { ArrowLeft: () => active - 1, ArrowRight: () => active + 1, Home: () => 0, End: () => tokens.length - 1 };
  const text = h("div", {
    class: "heat", id, dir: "auto", tabindex: 0, role: "group", "aria-label": `Answer ${i + 1}, token by token; arrow keys move between tokens`, "aria-describedby": `${id}-readout`,
    onkeydown: (event) => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      point(keys[event.key](), true);
    },
    onpointerover: (event) => { if (event.target !== text) point(tokens.indexOf(event.target)); },
  }, tokens);
  point(active);
  const steepest = steepestOf(beforeTheEnd(moved));
  return h("div", { class: "turn" }, h("h4", {}, `Answer ${i + 1}: reward ${number(read.rewards.at(-1))}`), text, readout, curve(read.rewards, i),
    steepest === null ? null : h("p", { class: "muted" }, `Largest change before the end: ${signed(moved[steepest])} at token ${steepest + 1} of ${whole(tokens.length)}, “${read.tokens[steepest].trim()}” (${percent(steepest / tokens.length)} of the way).`));
}

function steepestOf(moved) {
  let best = null;
  moved.forEach((change, k) => { if (change !== null && (best === null || Math.abs(change) > Math.abs(moved[best]))) best = k; });
  return best;
}

// The reward along the answer, without axes: its shape, from the first token to the last.
function curve(rewards, i) {
  const finite = rewards.filter((value) => value !== null);
  const low = Math.min(...finite);
  const high = Math.max(...finite);
  const y = (value) => 44 - 40 * (high > low ? (value - low) / (high - low) : 0.5);
  const x = (k) => (rewards.length > 1 ? (1000 * k) / (rewards.length - 1) : 500);
  let path = "";
  rewards.forEach((value, k) => { if (value !== null) path += `${path ? "L" : "M"}${x(k).toFixed(1)} ${y(value).toFixed(1)}`; });
  return h("div", {}, svg("svg", { class: "chart", viewBox: "0 0 1000 48", height: 48, preserveAspectRatio: "none", role: "img",
    "aria-label": `Reward along answer ${i + 1}: from ${number(rewards[0])} to ${number(rewards.at(-1))}, between ${number(low)} and ${number(high)}` },
  svg("path", { class: "line", d: path, "vector-effect": "non-scaling-stroke" })));
}
