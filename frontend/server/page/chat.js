"use strict";
/* Shows the conversation: its turns, and the answer that streams into the last one. */

/* A turn is { role, content, images, reasoning, plain, told, stopped, failure } and its elements.
   `images` are data URLs. `plain` marks a completion, which is shown as it is. complete() describes
   `told`. `failure` is a sentence. */
let turns = [];
let running = null; // the AbortController of the answer that streams
let editing = null; // the user's turn that the next message replaces

const COMPLETION_TOKENS = 256; // a model without a template may never stop by itself

function nearEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}
function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

/* ---------------------------------------------------------------- mode */

/* For a model that is not loaded, the list of models says it. */
function hasTemplate() {
  const { state, listed } = engine;
  const { has_chat_template: has } = listed.find(({ id }) => id === chosenModel) || listed[0] || {};
  return state?.has_chat_template ?? has ?? true;
}
/* "chat" sends the conversation through the model's template. "completion" sends the message
   alone, as the beginning of a text. A model without a template has only the latter. */
function mode() {
  if (!hasTemplate()) return "completion";
  return conversation.mode || recall(browserStore, "quire-mode") || "chat";
}
const WORDS = {
  chat: {
    title: "Ask, and see how the answer is made.",
    text: "Each answer shows its times and has a time line. The engine view shows every request.",
    starters: [
      "Tell me a story about the sea.",
      "What is 12 + 30?",
      "Once upon a time, a little fox",
    ],
    prompt: "Write a message",
    send: "Send",
  },
  completion: {
    title: "Write a beginning. The model continues it.",
    text: "Each text is sent as it is, without a chat template and without what came before.",
    starters: ["Once upon a time, a little fox", "The three most important things are"],
    prompt: "Write the beginning of a text",
    send: "Complete",
  },
};
let shownMode = "";
function showMode() {
  const now = mode();
  const words = WORDS[now];
  $("mode").disabled = !hasTemplate() || Boolean(running);
  $("mode").title = hasTemplate()
    ? "Chat uses the model's template. Completion sends the text as it is."
    : "This model has no chat template.";
  showSend();
  $("attach").hidden = !takesImages();
  if (engine.state?.default_sampling_params) showDefaults(engine.state, now === "chat");
  if (shownMode === now) return;
  shownMode = now;
  put($("mode"), `Mode: ${now}`);
  put($("welcome-title"), words.title);
  put($("welcome-text"), words.text);
  $("prompt").placeholder = words.prompt;
  fields.system.closest("label").hidden = now !== "chat";
  $("starters").replaceChildren(
    ...words.starters.map((textContent) => {
      const onclick = () => send(textContent);
      return h("button", { type: "button", className: "button", textContent, onclick });
    }),
  );
}
$("mode").onclick = () => {
  conversation.mode = mode() === "chat" ? "completion" : "chat";
  remember(browserStore, "quire-mode", conversation.mode);
  showMode();
};

/* ---------------------------------------------------------------- turns */

function button(textContent, onclick) {
  return h("button", { type: "button", className: "plain", textContent, onclick });
}

function addTurn(role, content, more = {}) {
  const text = h("div", { className: "text" });
  const meta = h("div", { className: "meta" });
  const name = h("h3", { className: "away", textContent: role === "user" ? "You" : "Answer" });
  const className = `turn ${role === "user" ? "user" : "answer"}`;
  const turn = { role, content, ...more, text, meta };
  turn.element = h("article", { className }, name, text, meta);
  if (role === "user") {
    text.textContent = content;
    if (turn.images?.length) text.before(thumbnails(turn.images));
    meta.append(button("Edit", () => edit(turn)));
  }
  turns.push(turn);
  $("welcome").hidden = true;
  $("log").append(turn.element);
  return turn;
}

function restoreTurn({ role, content, ...more }) {
  const turn = addTurn(role === "user" ? "user" : "assistant", String(content), more);
  if (turn.role === "user") return;
  if (!turn.told) turn.stopped = true; // the page was closed in the middle
  paint(turn);
  finish(turn);
}

function clearTurns() {
  for (const { element } of turns.splice(0)) element.remove();
  $("welcome").hidden = false;
}

function dropFrom(turn) {
  for (const { element } of turns.splice(turns.indexOf(turn))) element.remove();
  $("welcome").hidden = turns.length > 0;
}

function edit(turn) {
  if (running) return;
  editing = turn;
  $("prompt").value = turn.content;
  setAttached(turn.images || []);
  put($("hint"), "Sending replaces this message and what follows. Esc leaves it.");
  grow();
  $("prompt").focus();
}
const usualHint = [...$("hint").childNodes];
function endEdit() {
  editing = null;
  $("hint").replaceChildren(...usualHint);
}

/* Makes the turn's elements show its text. */
function paint(turn) {
  if (turn.reasoning && !turn.thought) {
    turn.thought = h("div");
    const summary = h("summary", { textContent: "Reasoning" });
    const box = h("details", { className: "thinking" }, summary, turn.thought);
    turn.element.insertBefore(box, turn.text);
  }
  if (turn.thought) put(turn.thought, turn.reasoning);
  turn.text.classList.toggle("markdown", !turn.plain);
  if (turn.plain) put(turn.text, turn.content);
  else renderMarkdown(turn.text, turn.content);
}

/* Writes the line below an answer that has ended: its figures, and what can be done with it. */
function finish(turn) {
  const told = turn.told || {};
  const { usage } = told;
  const parts = [];
  if (told.first != null) parts.push([seconds(told.first), " to first token"]);
  // An answer that arrived at once, or nearly so, does not show how fast its tokens were made.
  if (usage && told.last - told.first >= 0.05 && usage.completion_tokens > 1) {
    const rate = (usage.completion_tokens - 1) / (told.last - told.first);
    parts.push([whole(rate), " tokens/s"]);
  }
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const from = cached ? ` prompt tokens, ${whole(cached)} cached` : " prompt tokens";
    parts.push([whole(usage.prompt_tokens), from]);
    parts.push([whole(usage.completion_tokens), " output tokens"]);
  }
  if (told.total != null) parts.push([seconds(told.total), " in all"]);
  turn.meta.replaceChildren(
    ...parts.map(([figure, words]) => h("span", {}, h("b", { textContent: figure }), words)),
  );
  const isCut = told.reason === "length";
  if (turn.stopped || isCut) {
    const textContent = turn.stopped ? "stopped" : "cut at its limit";
    turn.meta.append(h("span", { textContent }));
  }
  if (told.id) turn.meta.append(button("Time line", () => openLife(told.id)));
  if (turn.content) turn.meta.append(copyButton(() => turn.content));
  if (turn.plain && turn.content) turn.meta.append(button("Continue", () => goOn(turn)));
  turn.meta.append(button("Regenerate", () => again(turn)));
  turn.element.querySelector(".wrong")?.remove();
  if (turn.failure) {
    const words = { className: "wrong", role: "alert", textContent: turn.failure };
    turn.meta.before(h("div", words));
  }
}

/* ---------------------------------------------------------------- answers */

function again(turn) {
  if (running) return;
  dropFrom(turn);
  answer();
}

/* Continues a completion where it ended. */
function goOn(turn) {
  if (running) return;
  const next = turns[turns.indexOf(turn) + 1];
  if (next) dropFrom(next);
  stream(turn, "v1/completions", completionBody(turn));
}

function completionBody(turn) {
  const before = turns[turns.indexOf(turn) - 1]?.content || "";
  return { max_tokens: COMPLETION_TOKENS, ...parameters(), prompt: before + turn.content };
}

function answer() {
  const asked = turns.filter((turn) => turn.content || turn.images?.length);
  const messages = asked.map((turn) => ({ role: turn.role, content: contentOf(turn) }));
  const system = fields.system.value;
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const plain = mode() === "completion";
  const turn = addTurn("assistant", "", { plain, reasoning: "" });
  if (plain) stream(turn, "v1/completions", completionBody(turn));
  else stream(turn, "v1/chat/completions", { ...parameters(), messages });
}

async function stream(turn, path, body) {
  const controller = new AbortController();
  const isShown = () => turn.element.isConnected;
  running = controller;
  Object.assign(turn, { told: null, stopped: false, failure: "" });
  turn.element.classList.add("streaming");
  turn.element.setAttribute("aria-busy", "true");
  turn.meta.replaceChildren();
  turn.element.querySelector(".wrong")?.remove();
  showMode();
  saveNow();
  toEnd();
  let told = null;
  let waiting = 0; // the timer of the next update
  let restUntil = 0; // a long answer takes long to paint: the page rests four times as long
  const update = () => {
    waiting = 0;
    const begin = performance.now();
    const follow = nearEnd();
    paint(turn);
    if (follow) toEnd();
    restUntil = begin + 5 * (performance.now() - begin);
  };
  const on = (text, reasoning, soFar) => {
    told = soFar;
    turn.content += text;
    turn.reasoning = (turn.reasoning || "") + reasoning;
    const rest = Math.max(0, restUntil - performance.now());
    waiting ||= setTimeout(() => requestAnimationFrame(update), rest);
    saveSoon();
  };
  poke();
  try {
    told = await complete(path, body, controller.signal, on);
  } catch (error) {
    if (error instanceof Refusal) turn.failure = inWords(error);
    else if (error.name !== "AbortError")
      turn.failure = `The connection broke off: ${error.message}`;
    if (error.status === 401) showKey(true);
  }
  turn.told = told || {};
  turn.stopped = controller.signal.aborted;
  if (running === controller) running = null;
  if (!isShown()) return; // another conversation has taken its place
  const follow = nearEnd();
  paint(turn);
  turn.element.classList.remove("streaming");
  turn.element.removeAttribute("aria-busy");
  finish(turn);
  showMode();
  saveNow();
  if (follow) toEnd();
  poke();
}
