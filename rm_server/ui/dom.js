// Elements, numbers and the clipboard. Text goes into the page as text nodes alone: nothing that was sent can be markup.

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export function number(value, digits = null) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  digits ??= size < 1 ? 4 : size < 100 ? 3 : 1;
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(2).replace("-", "−");
  return value.toFixed(digits).replace("-", "−");
}

export function signed(value, digits = null) {
  const text = number(value, digits);
  return value > 0 ? `+${text}` : text;
}

export const whole = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–");
export const percent = (value, digits = 0) => (Number.isFinite(value) ? `${(100 * value).toFixed(digits)}\u00a0%` : "–");

export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 ? whole(value) : value.toFixed(1);
}

const LEFT = new Set(["Notes", "Reason"]); // columns of words

export function table(caption, head, rows) {
  // A table may be wider than a narrow screen: its box scrolls, by keyboard too.
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {},
      h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: LEFT.has(name) ? "left" : null }, name)))),
      h("tbody", {}, rows)));
}

export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", {}, shown.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function copyable(text, label) {
  const code = h("code", {}, text);
  const block = h("pre", { tabindex: 0, role: "region", "aria-label": label }, code);
  const said = h("span", { role: "status", class: "muted" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = "Copied.";
    } catch {
      // Browsers lend the clipboard to https and localhost alone.
      getSelection().selectAllChildren(code);
      said.textContent = "Selected: press Ctrl+C.";
    }
  };
  const button = h("button", { type: "button", class: "small", "aria-label": `Copy: ${label}`, onclick: copy }, "Copy");
  return h("div", {}, block, h("div", { class: "row" }, button, said));
}
