// The checkpoint: what is served, what was measured, and how each trainer calls it.

import { calibrationChart } from "./charts.js";
import { copyable, facts, h, number, percent, table, whole } from "./dom.js";
import { fillIn, TRAINERS } from "./trainers.js";

export function showCheckpoint(section, info, { record, chat_template: template }) {
  fillWith(section,
    h("h2", { id: "title-checkpoint" }, "Checkpoint"),
    record === null
      ? h("p", { class: "card" }, info.recipe ? "There is no reward model: verifiers alone make the reward." : "This model has no reward_model.json: it was trained elsewhere, and nothing is known about its training. rm-train calibrate writes one.")
      : null,
    h("div", { class: "columns" }, h("div", {}, identity(info, record), data(record)), h("div", {}, measured(info, record), computed(info))),
    reliability(record), categories(record), golden(info, record), rendering(info, template), calls(info));
}

function fillWith(section, ...children) {
  section.replaceChildren(...children.filter((child) => child !== null));
}

const card = (title, ...children) => h("div", { class: "card" }, h("h3", {}, title), children);

function identity(info, record) {
  const base = record?.base_model;
  return card("Identity", facts([
    ["served as", info.model], ["reward_id", info.reward_id], ["model's own reward_id", info.model_reward_id],
    ["reward", info.conservative ? `mean − ${number(info.conservative)} · std over the heads` : null], ["checkpoint's own reward_id", info.checkpoint_reward_id],
    ["base", base ? base.name + (base.revision ? ` (revision ${base.revision})` : "") : null],
    ["kind", record?.kind === "adapter" ? "LoRA adapter and head" : record ? "full model" : null],
    ["written", record ? record.created.slice(0, 10) : null],
    ["trained in", record ? [record.numerics.dtype, record.numerics.quantization, record.numerics.device].filter(Boolean).join(", ") : null],
    ["git revision", record?.git_revision],
    ["tokenizer", info.tokenizer_hash],
  ]));
}

function data(record) {
  if (!record || !Object.keys(record.data).length) return null;
  const { data: found } = record;
  const count = (name) => (found[name] === undefined ? null : whole(found[name]));
  return card("Data", facts([
    ["sources", Array.isArray(found.sources) ? found.sources.join(", ") : null],
    ["training pairs", count("train_pairs")], ["evaluation pairs", count("eval_pairs")],
    ["prompts in both", count("leaked_prompts")], ["optimizer steps", count("steps")],
    ["longest in training", record.training_length ? `${whole(record.training_length)} tokens` : null],
    ["cut to it", found.truncated ? Object.entries(found.truncated).map(([split, n]) => `${split} ${whole(n)}`).join(", ") : null],
  ]));
}

function measured(info, record) {
  if (!record) return null;
  const { metrics, num_eval: evaluated } = record;
  const accuracy = metrics.accuracy;
  const length = metrics.length ?? {};
  const pairs = [
    ["accuracy", accuracy ? `${percent(accuracy.value, 1)} (95 % interval ${percent(accuracy.low, 1)} to ${percent(accuracy.high, 1)})` : null],
    ["on held-out pairs", metrics.pairs ? whole(metrics.pairs) : null],
    ["the longer answer wins", metrics.longer_wins === undefined ? null : percent(metrics.longer_wins, 1)],
    ["bag of words", typeof metrics.bag_of_words === "number" ? percent(metrics.bag_of_words, 1) : null],
    ["log-loss", metrics.log_loss === undefined ? null : `${number(metrics.log_loss)} (no preference: 0.6931)`],
    ["reward and length", typeof length.reward_correlation === "number" ? `correlation ${number(length.reward_correlation, 2)}` : null],
    ["chosen is shorter", length.chosen_shorter?.pairs ? `accuracy ${percent(length.chosen_shorter.accuracy, 1)} of ${whole(length.chosen_shorter.pairs)}` : null],
    ["reward", evaluated ? `mean ${number(record.reward_mean)}, standard deviation ${number(record.reward_std)}` : null],
    ["temperature", evaluated ? number(record.temperature) : null],
  ];
  if (!pairs.some(([, value]) => value !== null)) return card("Measured", h("p", {}, "Nothing was measured on this checkpoint."));
  return card("Measured", facts(pairs));
}

function computed(info) {
  return card("As it is served", facts([
    ["numbers", `${info.dtype}; head ${info.head_dtype}`], ["why", info.dtype_reason], ["device", info.device],
    ["longest sequence", `${whole(info.max_length)} tokens`], ["prefix sharing", info.prefix_sharing], ["prefix cache", info.prefix_cache],
    ["token rewards", info.token_rewards],
    ["versions", Object.entries(info.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ]));
}

function reliability(record) {
  const found = record?.metrics.calibration;
  const bins = found?.reliability?.filter(({ pairs }) => pairs > 0);
  if (!bins?.length) return null;
  const rows = bins.map((bin) => h("tr", {}, h("th", { scope: "row" }, `${percent(bin.low)} to ${percent(bin.high)}`),
    h("td", {}, whole(bin.pairs)), h("td", {}, percent(bin.confidence, 1)), h("td", {}, percent(bin.accuracy, 1))));
  return card("Reliability", h("p", {}, `When the model, at temperature ${number(found.temperature)}, gives its favourite a probability, how often is that answer the chosen one? Expected error ${percent(found.expected_error, 1)}.`),
    h("div", { class: "columns" }, calibrationChart(bins), table("Reliability by confidence", ["Probability", "Pairs", "Mean", "Chosen"], rows)));
}

function categories(record) {
  const found = Object.entries(record?.metrics.by_category ?? {});
  if (found.length < 2) return null;
  const rows = found.slice(0, 20).map(([name, share]) => h("tr", {}, h("td", { class: "text" }, name), h("td", {}, percent(share.accuracy, 1)), h("td", {}, whole(share.pairs))));
  return card("By category", table("Accuracy by category", ["Category", "Accuracy", "Pairs"], rows),
    found.length > 20 ? h("p", { class: "muted" }, `and ${found.length - 20} more`) : null);
}

function golden(info, record) {
  if (!record?.golden.scores.length) return null;
  const rows = record.golden.scores.map((score) => h("tr", {}, h("th", { scope: "row" }, score.name), h("td", {}, whole(score.num_tokens)), h("td", {}, number(score.reward))));
  const allowed = record.golden.tolerance[info.dtype];
  return card("Golden scores", h("p", {}, "Fixed conversations as the trainer scored them. The server scored them again when it loaded this checkpoint, and would have refused it beyond "
    + `${allowed === undefined ? "the tolerance" : number(allowed)} (${info.dtype}).`), table("Golden scores", ["Conversation", "Tokens", "Reward"], rows));
}

function rendering(info, template) {
  const rules = info.rendering;
  if (!rules) return null;
  const block = template ? h("details", {}, h("summary", {}, "The chat template"), copyable(template, "Chat template")) : null;
  return card("How text becomes tokens", facts([
    ["strings", rules.text_as === "raw" ? "as they are, prompt and answer together" : "one user and one assistant turn"],
    ["messages", rules.chat_template ? "through the chat template" : "not possible: there is no chat template"],
    ["a chat ends at", rules.end === "token" ? rules.end_of_turn : "the end of what the template prints"], ["a text ends at", rules.end_of_text],
    ["thinking blocks", rules.thinking], ["today, for templates that print it", rules.date],
  ]), block);
}

function calls(info) {
  const address = new URL(".", location.href).href.replace(/\/$/, "");
  const needsKey = document.documentElement.dataset.needsKey === "true";
  const blocks = TRAINERS.map(({ name, code }, i) => h("details", { open: i === 0 }, h("summary", {}, name), copyable(fillIn(code, address, info.reward_id, needsKey), `Call from ${name}`)));
  return card("Call it from a trainer", h("p", {}, "The reward_id pins this reward model: a run stops when another one is served in its place."),
    needsKey ? h("p", {}, "This server asks for a key: put yours in the place of “…”. slime, miles, LLaMA-Factory and OpenRLHF's and verl's routes send none: docs/integrations.md says what to do.") : null, blocks);
}
