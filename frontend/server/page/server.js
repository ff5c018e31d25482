"use strict";
/* Sends requests to the server with the API key, and reads refusals and server-sent events. */

/* The page is the root of the server, whatever prefix a proxy puts before it. */
const ROOT = location.pathname.replace(/\/?$/, "/");
/* The chosen model of a server with several; "" is the default, and where there is one. */
let chosenModel = recall(browserStore, "quire-model");
let apiKey = recall(tabStore, "quire-key");

class Refusal extends Error {
  constructor(message, status, body, retryAfter) {
    super(message);
    Object.assign(this, { status, body, retryAfter });
  }
}

/* `path` has no leading slash. Throws Refusal, or AbortError after options.signal. */
async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  let response;
  try {
    response = await fetch(ROOT + path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer.", 0);
  }
  if (response.ok) return response;
  let body = null;
  try {
    body = await response.json();
  } catch {
    /* The answer is not the server's own, but perhaps a proxy's: the status has to do. */
  }
  const plain = `The server answered ${response.status} ${response.statusText}.`;
  const retryAfter = Number(response.headers.get("retry-after")) || 0;
  throw new Refusal(body?.error?.message || plain, response.status, body, retryAfter);
}

/* Returns the path of a view of the chosen model's engine. */
function ofModel(path) {
  if (!chosenModel) return path;
  return `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(chosenModel)}`;
}

/* Returns the model's name as the engine calls it, or as chosen while there is no engine. */
const modelName = () => engine.model || chosenModel;

const post = (path, body, signal) =>
  call(path, {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...(modelName() && { model: modelName() }), ...body }),
  });

function inWords(error) {
  if (error.status === 401 || error.status === 403)
    return `${error.message} The field “API key” above takes the key.`;
  if (error.retryAfter && (error.status === 429 || error.status === 503))
    return `${error.message} Try again in ${several(error.retryAfter, "second")}.`;
  return error.message;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value || "")).split(/\r?\n/);
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // a comment, or the end of an event
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
    if (done) return;
  }
}

/* Runs one streaming request. `on(text, reasoning, told)` gets every piece. Returns `told`: the
   request's id, its finish reason, its usage, and seconds to the first token, last token, end. */
async function complete(path, body, signal, on) {
  const begin = performance.now();
  const elapsed = () => (performance.now() - begin) / 1e3;
  const told = { id: null, first: null, last: null, usage: null, reason: null };
  const streaming = { stream: true, stream_options: { include_usage: true } };
  const response = await post(path, { ...body, ...streaming }, signal);
  told.id = response.headers.get("x-request-id");
  for await (const chunk of events(response)) {
    if (chunk.id) told.id = chunk.id; // the engine's own name for it
    if (chunk.error) throw new Refusal(chunk.error.message, 500, chunk);
    const choice = chunk.choices?.[0] || {};
    const text = choice.text ?? choice.delta?.content ?? "";
    const reasoning = choice.delta?.reasoning_content || choice.delta?.reasoning || "";
    if (text || reasoning) {
      told.last = elapsed();
      told.first ??= told.last;
    }
    if (choice.finish_reason) told.reason = choice.finish_reason;
    if (chunk.usage) told.usage = chunk.usage;
    on(text, reasoning, told);
  }
  told.total = elapsed();
  return told;
}
