// What one call of /score said: rewards, ranks, who beats whom, advantages, and what it cost.

import { h, number, percent, signed, table, whole } from "./dom.js";
import { showHeat } from "./heat.js";
import { advantages, beats, ranks } from "./stats.js";

export function showResults(box, answer, info, checkpoint, texts) {
  const rewards = answer.rewards;
  const isCalibrated = (checkpoint.record?.num_eval ?? 0) > 0;
  const temperature = isCalibrated ? info.temperature : 1;
  const parts = [h("h3", { id: "results", tabindex: -1 }, "Rewards"), rewardTable(answer, texts)];
  if (rewards.filter((reward) => reward !== null).length > 1) {
    parts.push(h("h3", {}, "Who beats whom"), matrix(rewards, temperature), h("p", { class: "muted" }, isCalibrated
      ? `Probability that the row's answer is better: σ(difference / ${number(temperature)}), the temperature that fits the checkpoint's evaluation pairs.`
      : "Probability that the row's answer is better: σ(difference). This checkpoint has no calibrated temperature."));
  }
  parts.push(cost(answer));
  box.replaceChildren(h("div", { class: "card", id: "rewards" }, parts));
  if (answer.token_rewards) showHeat(box, answer, info, checkpoint);
  else box.append(h("p", { class: "muted" }, `Token by token: ${info.token_rewards}.`));
  box.querySelector("#results").focus();
}

function rewardTable(answer, texts) {
  const { rewards, components } = answer;
  const rank = ranks(rewards);
  const sample = advantages(rewards, 1);
  const population = advantages(rewards, 0);
  const names = Object.keys(components ?? {});
  const noted = rewards.map((_, i) => notes(answer, i, texts[i]));
  const hasNotes = noted.some(Boolean);
  const rows = rewards.map((reward, i) => h("tr", { class: rank[i] === 1 ? "best" : null },
    h("th", { scope: "row" }, `Answer ${i + 1}`), h("td", { "data-reward": reward }, number(reward)), h("td", {}, rank[i] ?? "–"),
    h("td", {}, reward === null ? "–" : signed(sample[i])), h("td", {}, reward === null ? "–" : signed(population[i])),
    h("td", {}, whole(length(answer, i))), names.map((name) => h("td", {}, number(components[name][i]))),
    hasNotes ? h("td", { class: "text" }, noted[i]) : null));
  return h("div", {}, table("Rewards of the answers", ["Answer", "Reward", "Rank", "Advantage ÷ (n − 1)", "Advantage ÷ n", "Tokens", ...names, ...(hasNotes ? ["Notes"] : [])], rows),
    h("p", { class: "muted" }, "A reward is a raw number without a scale of its own: only differences between answers to one prompt mean anything. "
      + "Advantages are (reward − mean) / (standard deviation + 0.0001), with the deviation over n − 1 (TRL, verl) or n answers."));
}

function length(answer, i) {
  const read = answer.token_rewards?.[i];
  return read ? read.start + read.tokens.length : NaN;
}

function notes(answer, i, text) {
  const found = [];
  const error = (answer.errors ?? []).find(({ index }) => index[0] === i);
  if (error) found.push(error.message);
  if (answer.truncated[i]) found.push("cut from the left");
  if ((answer.over_training_length ?? []).some(([place]) => place === i)) found.push("longer than any in training");
  if (!text) found.push("empty");
  return found.join("; ");
}

function matrix(rewards, temperature) {
  const head = ["Better", ...rewards.map((_, i) => `than ${i + 1}`)];
  const rows = rewards.map((a, i) => h("tr", {}, h("th", { scope: "row" }, `Answer ${i + 1}`),
    rewards.map((b, k) => h("td", {}, i === k || a === null || b === null ? "–" : percent(beats(a, b, temperature), 1)))));
  return table("Probability that one answer beats another", head, rows);
}

function cost(answer) {
  const { tokens, computed_tokens: computed } = answer.usage;
  const saved = tokens > computed ? `; sharing saved ${percent(1 - computed / tokens)}` : "";
  const { queue_ms: queue, tokenize_ms: tokenize, forward_ms: forward } = answer.timing;
  return h("p", { id: "cost" }, `${whole(tokens)} tokens, of which ${whole(computed)} were computed${saved}. `
    + `Waiting ${number(queue, 1)} ms, tokenising ${number(tokenize, 1)} ms, forward ${number(forward, 1)} ms.`);
}
