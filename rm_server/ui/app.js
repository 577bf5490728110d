// The page: which of its three views is shown, and the key without which the server tells nothing.

import { ApiError, forgetKey, getJson, storedKey, storeKey } from "./api.js";
import { h } from "./dom.js";
import { showCheckpoint } from "./checkpoint.js";
import { startLive } from "./live.js";
import { startPlayground } from "./playground.js";

const PAGES = ["playground", "checkpoint", "live"];
const byId = (id) => document.getElementById(id);
const needsKey = document.documentElement.dataset.needsKey === "true";
let views = null;

function pageInUrl() {
  const name = location.hash.slice(1).split("=")[0];
  return PAGES.includes(name) ? name : "playground";
}

function route() {
  const current = pageInUrl();
  for (const name of PAGES) {
    byId(`page-${name}`).hidden = views === null || name !== current;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${current[0].toUpperCase()}${current.slice(1)} · betterthan`;
  if (views === null) return;
  if (current === "playground") views.playground.readUrl();
  views.live.setVisible(current === "live" && !document.hidden);
}

function askForKey(problem) {
  byId("key-form").hidden = false;
  byId("key-problem").hidden = !problem;
  byId("key-problem").textContent = problem ?? "";
  byId("key").focus();
}

function complain(error) {
  const again = h("button", { type: "button", onclick: load }, "Try again");
  byId("load-problem").replaceChildren(h("p", {}, error.message), again);
  byId("load-problem").hidden = false;
}

async function load() {
  byId("load-problem").hidden = true;
  if (needsKey && !storedKey()) return askForKey();
  let info, checkpoint;
  try {
    [info, checkpoint] = await Promise.all([getJson("info"), getJson("ui/checkpoint")]);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status !== 401) return complain(error);
    forgetKey();
    return askForKey(error.message);
  }
  byId("key-form").hidden = true;
  const shown = [h("span", { title: info.reward_id }, `${info.model} · ${info.reward_id.slice(0, 15)}…`)];
  if (needsKey) shown.push(" ", h("button", { type: "button", class: "small", onclick: leave }, "Forget the key"));
  byId("served").replaceChildren(...shown);
  showCheckpoint(byId("page-checkpoint"), info, checkpoint);
  views = {
    playground: startPlayground(byId("page-playground"), info, checkpoint),
    live: startLive(byId("page-live"), onUnauthorized),
  };
  route();
}

function leave() {
  forgetKey();
  location.reload();
}

function onUnauthorized(message) {
  forgetKey();
  views?.live.setVisible(false);
  views = null;
  route();
  askForKey(message);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value.trim());
  byId("key").value = "";
  load();
});
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", route);
route();
load();
