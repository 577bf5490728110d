// Calls to the server that served this page. The key stays in this tab's session storage.

const KEY = "betterthan.key";

export const storedKey = () => sessionStorage.getItem(KEY);
export const storeKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

export class ApiError extends Error {
  constructor(status, type, message, items = []) {
    super(message);
    Object.assign(this, { status, type, items });
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (storedKey()) {
    // Other characters cannot be sent in a header.
    if (!/^[\x21-\x7e]+$/.test(storedKey())) throw new ApiError(401, "unauthorized", "This is no key: a key is one word of plain letters, digits and signs.");
    headers.Authorization = `Bearer ${storedKey()}`;
  }
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const said = body.error ?? {};
  throw new ApiError(response.status, said.type ?? "error", said.message ?? `The server answered ${response.status}.`, body.errors);
}

export const getJson = async (path) => (await request(path)).json();

export async function postScore(body, signal) {
  const headers = { "Content-Type": "application/json" };
  return (await request("score", { method: "POST", body: JSON.stringify(body), headers, signal })).json();
}

// Server-sent events by fetch, since EventSource cannot send a key. Calls onEvent with each event's data.
export async function readEvents(path, onEvent, signal) {
  const response = await request(path, { signal, headers: { Accept: "text/event-stream" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (waiting + value).split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) onEvent(JSON.parse(data));
    }
  }
}
