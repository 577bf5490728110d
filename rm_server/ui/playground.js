// The playground: a conversation and two to eight answers. What was written is kept in the URL's fragment, which
// browsers send to no server.

import { ApiError, postScore } from "./api.js";
import { h } from "./dom.js";
import { showResults } from "./results.js";

const MOST_ANSWERS = 8;
const LONGEST_LINK = 32000;
const ROLES = ["system", "user", "assistant", "tool"];
const START = {
  mode: "chat",
  turns: [{ role: "user", text: "How do I look after a cactus?" }],
  text: "",
  answers: [
    { text: "Give it plenty of light and water it only when the soil is dry, every two or three weeks in summer. It rots if it stands in water.", finished: true },
    { text: "Plants are nice. Some people like them. A cactus is a plant, and there are many plants.", finished: true },
  ],
  truncate: false,
  reference: "",
};

// btoa takes bytes; a spread of a long array would overflow the stack.
function encode(state) {
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function decode(encoded) {
  try {
    const bytes = Uint8Array.from(atob(encoded.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
    return checked(JSON.parse(new TextDecoder().decode(bytes)));
  } catch {
    return null;
  }
}

// A link may come from anywhere: only strings, booleans and sensible numbers of them get through.
function checked(raw) {
  const text = (value) => (typeof value === "string" ? value : "");
  const list = (value, most) => (Array.isArray(value) ? value.slice(0, most) : []);
  const turns = list(raw.turns, 64).map((turn) => ({ role: ROLES.includes(turn?.role) ? turn.role : "user", text: text(turn?.text) }));
  const answers = list(raw.answers, MOST_ANSWERS).map((answer) => ({ text: text(answer?.text), finished: answer?.finished !== false }));
  while (answers.length < 2) answers.push({ text: "", finished: true });
  return {
    mode: raw.mode === "text" ? "text" : "chat",
    turns: turns.length ? turns : structuredClone(START.turns),
    text: text(raw.text), answers, truncate: raw.truncate === true, reference: text(raw.reference),
  };
}

export function startPlayground(section, info, checkpoint) {
  const hasTemplate = Boolean(info.rendering?.chat_template);
  let state = structuredClone(START);
  if (!hasTemplate) state = { ...state, mode: "text", text: `${START.turns[0].text}\n` };
  let written = "";
  let timer = 0;
  let running = null;

  const turns = h("div");
  const answers = h("div");
  const link = h("p", { class: "muted", role: "status" });
  const problem = h("div", { class: "problem", role: "alert", hidden: true });
  const results = h("div");
  const run = h("button", { type: "submit", class: "primary" }, "Score");
  const form = h("form", {}, h("div", { class: "columns" },
    h("div", { class: "card" }, turns), h("div", { class: "card" }, answers)),
  h("div", { class: "row" }, run, h("span", { class: "muted" }, "or Ctrl+Enter")), link, problem);
  section.replaceChildren(h("h2", { id: "title-playground" }, "Playground"), form, results);

  const changed = () => {
    clearTimeout(timer);
    timer = setTimeout(writeUrl, 250);
  };

  function writeUrl() {
    written = encode(state);
    const fits = written.length <= LONGEST_LINK;
    link.textContent = fits ? "" : "This is too long for a link: the address no longer holds it.";
    if (section.hidden) return;
    history.replaceState(null, "", fits ? `#playground=${written}` : "#playground");
  }

  function readUrl() {
    const encoded = location.hash.split("=")[1];
    if (!encoded && written) return writeUrl(); // the link to this view names no state
    if (!encoded || encoded === written) return;
    const found = decode(encoded);
    if (!found) return say("The link in the address cannot be read.");
    state = found;
    written = encoded;
    draw();
  }

  function say(message) {
    problem.hidden = !message;
    problem.replaceChildren(message ?? "");
  }

  function draw() {
    drawConversation();
    drawAnswers();
  }

  function area(label, id, value, rows, onChange) {
    const box = h("textarea", { id, rows, dir: "auto", value, oninput: () => { onChange(box.value); changed(); } });
    return [h("label", { for: id }, label), box];
  }

  function drawConversation() {
    const modes = [["chat", "Conversation"], ["text", "Plain text"]].map(([mode, name]) =>
      h("label", { class: "beside" }, h("input", {
        type: "radio", name: "mode", value: mode, checked: state.mode === mode, disabled: mode === "chat" && !hasTemplate,
        onchange: () => { state.mode = mode; changed(); drawConversation(); },
      }), name));
    const parts = [h("fieldset", {}, h("legend", {}, "The prompt is"), h("div", { class: "row" }, modes))];
    if (state.mode === "text") {
      parts.push(...area("Prompt", "prompt", state.text, 6, (text) => { state.text = text; }));
    } else {
      state.turns.forEach((turn, i) => parts.push(drawTurn(turn, i)));
      parts.push(h("button", { type: "button", id: "add-turn", onclick: addTurn }, "Add a message"));
    }
    if (info.recipe) {
      parts.push(h("div", { class: "turn" }, h("label", { for: "reference" }, "Reference for the verifiers (optional)"),
        h("input", { type: "text", id: "reference", value: state.reference, oninput: (event) => { state.reference = event.target.value; changed(); } })));
    }
    turns.replaceChildren(...parts);
  }

  function drawTurn(turn, i) {
    const choose = h("select", { "aria-label": `Role of message ${i + 1}`, onchange: () => { turn.role = choose.value; changed(); } },
      ROLES.map((role) => h("option", { value: role }, role)));
    choose.value = turn.role;
    const remove = h("button", { type: "button", class: "small", "aria-label": `Remove message ${i + 1}`, disabled: state.turns.length < 2,
      onclick: () => { state.turns.splice(i, 1); changed(); drawConversation(); turns.querySelector("#add-turn").focus(); } }, "Remove");
    const box = h("textarea", { rows: 3, dir: "auto", value: turn.text, "aria-label": `Text of message ${i + 1}`, oninput: () => { turn.text = box.value; changed(); } });
    return h("div", { class: "turn" }, h("div", { class: "row spread" }, choose, remove), box);
  }

  function addTurn() {
    const last = state.turns.at(-1).role;
    state.turns.push({ role: last === "user" ? "assistant" : "user", text: "" });
    changed();
    drawConversation();
    turns.querySelectorAll("textarea")[state.turns.length - 1].focus();
  }

  function drawAnswers() {
    const parts = state.answers.map((answer, i) => {
      const finished = h("input", { type: "checkbox", checked: answer.finished, onchange: (event) => { answer.finished = event.target.checked; changed(); } });
      const remove = h("button", { type: "button", class: "small", "aria-label": `Remove answer ${i + 1}`, disabled: state.answers.length < 3,
        onclick: () => { state.answers.splice(i, 1); changed(); drawAnswers(); answers.querySelector("#add-answer").focus(); } }, "Remove");
      const id = `answer-${i + 1}`;
      const [label, box] = area(`Answer ${i + 1}`, id, answer.text, 3, (text) => { answer.text = text; });
      return h("div", { class: "turn" }, h("div", { class: "row spread" }, label,
        h("span", { class: "row" }, h("label", { class: "beside", title: "Not ticked: it was cut by a length limit, and no end token is added" }, finished, "finished"), remove)), box);
    });
    const add = h("button", { type: "button", id: "add-answer", disabled: state.answers.length >= MOST_ANSWERS, onclick: () => {
      state.answers.push({ text: "", finished: true });
      changed();
      drawAnswers();
      answers.querySelectorAll("textarea")[state.answers.length - 1].focus();
    } }, "Add an answer");
    const cut = h("label", { class: "beside" }, h("input", { type: "checkbox", checked: state.truncate,
      onchange: (event) => { state.truncate = event.target.checked; changed(); } }), "Cut what is too long from the left");
    answers.replaceChildren(...parts, h("div", { class: "row spread" }, add, cut));
  }

  function body() {
    const prompt = state.mode === "text" ? state.text : state.turns.map(({ role, text }) => ({ role, content: text }));
    const wanted = { completions: state.answers.map(({ text, finished }) => ({ content: text, finished })), prompt };
    if (state.truncate) wanted.truncation = "left";
    if (info.recipe && state.reference) wanted.reference = state.reference;
    if (info.token_rewards === "on") wanted.token_rewards = true;
    return wanted;
  }

  async function score() {
    running?.abort();
    const mine = (running = new AbortController());
    say(null);
    run.disabled = true;
    run.textContent = "Scoring…";
    try {
      const answer = await postScore(body(), mine.signal);
      showResults(results, answer, info, checkpoint, state.answers.map(({ text }) => text));
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ApiError)) throw error;
      results.replaceChildren();
      say(error.message);
    } finally {
      if (running === mine) {
        run.disabled = false;
        run.textContent = "Score";
      }
    }
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); score(); });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); score(); }
  });
  draw();
  return { readUrl };
}
