// The live page: what the server's events say, and the last five minutes of it.

import { ApiError, readEvents } from "./api.js";
import { histogram, responsive, series } from "./charts.js";
import { h, number, percent, rate, signed, table, whole } from "./dom.js";

const KEPT_TICKS = 300;
const RETRY_SECONDS = 3;

const TILES = [
  ["answers", "answers / s", (e) => [rate(e.rates.items)]],
  ["tokens", "tokens / s", (e) => [rate(e.rates.tokens), `${rate(e.rates.computed_tokens)} computed`]],
  ["queue", "tokens in the queue", (e) => [whole(e.queue.tokens), `${whole(e.queue.requests)} requests open`]],
  ["wait", "wait for a batch", (e) => [e.rates.queue_ms === null ? "–" : `${whole(e.rates.queue_ms)} ms`, `forward ${e.rates.forward_ms === null ? "–" : `${whole(e.rates.forward_ms)} ms`}`]],
  ["fill", "batch fill", (e) => [percent(e.rates.batch_fill ?? NaN), e.rates.batch_items === null ? "no batch lately" : `${rate(e.rates.batch_items)} answers a batch`]],
  ["sharing", "not computed", (e) => [percent(e.rates.saved ?? NaN), `from the cache ${percent(e.rates.cache_hits ?? NaN)}`]],
  ["mean", "mean reward", (e) => [number(e.rewards.mean), `of the last ${whole(e.rewards.count)}`]],
  ["drift", "drift", (e) => [e.rewards.drift === null ? "–" : `${signed(e.rewards.drift, 2)} σ`, e.checkpoint ? `from ${number(e.checkpoint.mean)}` : "nothing to compare with"]],
];
const SERIES = [
  ["Mean reward", (e) => e.rewards.mean, (v) => number(v, 3), null],
  ["Answers a second", (e) => e.rates.items, rate, 0],
  ["Tokens in the queue", (e) => e.queue.tokens, (v) => (v >= 10000 ? `${Math.round(v / 1000)} k` : whole(v)), 0],
  ["Batch fill", (e) => e.rates.batch_fill, (v) => percent(v), 0],
];

export function startLive(section, onUnauthorized) {
  const events = [];
  let stopping = null;
  let latest = null;
  const status = h("span", { role: "status", class: "muted" }, "Not connected.");
  const tiles = new Map(TILES.map(([id, name]) => [id, { name, value: h("dd", { id: `live-${id}` }, "–") }]));
  const bars = responsive((width) => histogram(latest?.rewards.histogram ?? { edges: [0, 1], counts: [0] }, latest?.checkpoint?.mean, latest?.checkpoint?.std)(width));
  const lines = SERIES.map(([name, read, format, floor]) => ({ name, chart: responsive((width) => series(name, events.map((e) => [latest.time - e.time, read(e)]), format, floor)(width)) }));
  const spread = h("div");
  const refusals = h("div");
  const band = h("p", { class: "muted" });
  section.replaceChildren(
    h("div", { class: "row spread" }, h("h2", { id: "title-live" }, "Live"), status),
    h("dl", { class: "tiles" }, [...tiles.values()].map(({ name, value }) => h("div", { class: "tile" }, h("dt", {}, name), value))),
    h("div", { class: "columns" },
      h("div", {}, h("div", { class: "card" }, h("h3", {}, "Rewards"), bars.box, band, spread),
        h("div", { class: "card" }, h("h3", {}, "Refused and failed, since the start"), refusals)),
      h("div", { class: "card" }, lines.map(({ name, chart }) => h("div", {}, h("h4", {}, name), chart.box)))),
    h("p", { class: "muted" }, "Rates are over the last ten seconds, rewards over the last 4096 answers. No text is kept or shown here."));

  function show(event) {
    latest = event;
    // After a swap of the checkpoint, rewards have another scale: the old ones do not belong in the same lines.
    if (events.length && events.at(-1).reward_id !== event.reward_id) events.length = 0;
    events.push(event);
    if (events.length > KEPT_TICKS) events.shift();
    for (const [id, , read] of TILES) {
      const [value, more] = read(event);
      tiles.get(id).value.replaceChildren(value, more ? h("small", {}, more) : "");
    }
    bars.redraw();
    for (const { chart } of lines) chart.redraw();
    const { quantiles, std, count } = event.rewards;
    band.textContent = event.checkpoint ? "Dashed: the checkpoint's mean on its evaluation pairs; shaded: one standard deviation around it. The outermost bars hold all that lies beyond." : "";
    const cells = count ? [quantiles.p05, quantiles.p25, quantiles.p50, quantiles.p75, quantiles.p95, std] : Array(6).fill(NaN);
    spread.replaceChildren(table("Quantiles of the rewards", ["5 %", "25 %", "median", "75 %", "95 %", "std"], [h("tr", {}, cells.map((value) => h("td", {}, number(value, 2))))]));
    const counts = [...Object.entries(event.refused).map((entry) => ["request refused", ...entry]), ...Object.entries(event.failed).map((entry) => ["answer failed", ...entry])];
    if (event.cancelled) counts.push(["caller left", "", event.cancelled]);
    refusals.replaceChildren(counts.length
      ? table("Refused and failed", ["What", "Reason", "Count"], counts.map(([what, reason, n]) => h("tr", {}, h("td", {}, what), h("td", { class: "left" }, reason), h("td", {}, whole(n)))))
      : h("p", {}, "Nothing."));
  }

  async function follow(signal) {
    while (!signal.aborted) {
      try {
        status.textContent = "Connecting…";
        await readEvents("ui/live", (event) => { status.textContent = "Following the server."; show(event); }, signal);
        status.textContent = "The server ended the stream; trying again.";
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ApiError && error.status === 401) return onUnauthorized(error.message);
        status.textContent = `${error instanceof ApiError ? error.message : "The connection broke."} Trying again.`;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
    }
  }

  function setVisible(isVisible) {
    if (isVisible && stopping === null) {
      stopping = new AbortController();
      follow(stopping.signal);
    } else if (!isVisible && stopping !== null) {
      stopping.abort();
      stopping = null;
      status.textContent = "Paused.";
    }
  }

  return { setVisible };
}
