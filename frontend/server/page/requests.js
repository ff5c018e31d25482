"use strict";
/* Shows the two lists: requests in the engine, and requests that this server has finished. */

const STATES = {
  waiting: "waiting",
  swapped: "swapped out",
  held: "held by a pause",
  grammar: "compiling its grammar",
};
const ENDED = { stop: "a stop", length: "its limit", abort: "an abort", error: "an error" };

/* Returns the id that the client knows: without the engine's suffix and the number of one of
   several completions. */
const userId = (id) => id.replace(/-[0-9a-f]{16}$/, "").replace(/^\d+_/, "");
function shortId(id) {
  const hex = /^(?:[a-z]+[-_])?([0-9a-f]{8})[0-9a-f]{4,}(-\d+)?$/.exec(id);
  if (hex) return hex[1] + (hex[2] || "");
  return id.length > 12 ? `${id.slice(0, 11)}…` : id;
}

/* ---------------------------------------------------------------- in the engine */

function makeRow(request) {
  const bar = (...kinds) =>
    h("span", { className: "track" }, ...kinds.map((kind) => h("i", { className: `s-${kind}` })));
  const part = (className = "") => h("span", { className });
  const id = userId(request.request_id);
  const child = /^\d+(?=_)/.exec(request.request_id); // one of several completions
  const row = {
    name: h("span", {
      className: "mono",
      textContent: shortId(id) + (child ? `.${child[0]}` : ""),
    }),
    state: part("state"),
    prompt: part(),
    output: part(),
    prefill: bar("cached", "prompt"),
    decode: bar("output"),
  };
  row.element = h(
    "button",
    { type: "button", className: "request request-grid", title: id, onclick: () => openLife(id) },
    h("span", { className: "who" }, row.name, row.state),
    h("span", { className: "gauge" }, row.prompt, row.prefill),
    h("span", { className: "gauge" }, row.output, row.decode),
  );
  return row;
}

function fillRow(row, request) {
  const { num_prompt_tokens: prompt, num_output_tokens: output } = request;
  const prefilled = Math.min(request.num_computed_tokens, prompt);
  const cached = Math.min(request.num_cached_tokens || 0, prefilled);
  const limit = Math.max(1, request.max_tokens ?? engine.state.max_model_len - prompt);
  const phase = prefilled < prompt ? "prefill" : "decode";
  const state = request.state === "running" ? phase : STATES[request.state] || request.state;
  const doing = request.lora_name ? `${request.lora_name}, ${state}` : state;
  const { num_preemptions: preemptions } = request;
  put(row.state, doing + (preemptions ? `, preempted ${times(preemptions)}` : ""));
  put(row.prompt, `${whole(prefilled)} of ${whole(prompt)}`);
  put(row.output, `${whole(output)} of ${whole(limit)}`);
  const [fromCache, computed] = row.prefill.children;
  fromCache.style.width = `${(100 * cached) / prompt}%`;
  computed.style.width = `${(100 * (prefilled - cached)) / prompt}%`;
  row.decode.firstChild.style.width = `${Math.min(100, (100 * output) / limit)}%`;
  const parts = [
    `${prefilled} of ${prompt} prompt tokens`,
    `${cached} cached`,
    `${output} output tokens`,
    several(request.num_blocks, "block"),
  ];
  row.element.setAttribute("aria-label", `${row.name.textContent}, ${doing}: ${parts.join(", ")}`);
}

const listRequests = longList($("rows"), {
  key: (request) => request.request_id,
  make: makeRow,
  fill: fillRow,
});

function showRequests(state) {
  const isRunning = (request) => request.state === "running";
  const waiting = state.requests.filter((request) => !isRunning(request));
  listRequests([...state.requests.filter(isRunning), ...waiting]);
  const all = state.requests.length + state.num_queued;
  put($("num-requests"), all ? whole(all) : "");
  if (all) burstFailed = "";
  const queued = `${whole(state.num_queued)} more wait in the server's queue.`;
  put($("no-rows"), state.num_queued ? queued : burstFailed || "No requests.");
  $("no-rows").hidden = all > 0 && !state.num_queued;
  put($("burst"), burst ? "Stop them" : "Send 12 at once");
  const { num_finished: ended } = state;
  put($("num-finished"), ended ? whole(ended) : "");
  put($("recent-told"), ended > KEPT ? `the last ${whole(KEPT)} are listed` : "");
  if ($("life").open && life.isLive) showLife();
}

/* ---------------------------------------------------------------- finished */

const KEPT = 1024; // the server keeps as many, see MAX_REQUESTS
const finished = { list: [], wanted: 64, asked: 0, seen: -1, isBusy: false };

const listFinished = longList($("recent-rows"), {
  key: (request) => request.id,
  make(request) {
    const cells = ["mono", "", "optional", "", "", "optional", "optional"].map((className) =>
      h("span", { className }),
    );
    const onclick = () => openLife(request.id);
    const className = "request recent-grid";
    const properties = { type: "button", className, title: request.id, onclick };
    return { cells, element: h("button", properties, ...cells) };
  },
  fill({ cells, element }, request) {
    const ended = ENDED[request.finish_reason] || request.finish_reason;
    const words = [
      shortId(request.id),
      whole(request.prompt_tokens),
      request.cached_tokens ? whole(request.cached_tokens) : "–",
      whole(request.completion_tokens),
      seconds(request.ttft_s),
      seconds(request.e2e_s),
      ended.replace(/^(an?|its) /, ""),
    ];
    words.forEach((text, i) => put(cells[i], text));
    const [id, prompt, , output] = words;
    const about = `${prompt} prompt tokens, ${output} output tokens, ended by ${ended}`;
    element.setAttribute("aria-label", `${id}: ${about}`);
  },
  onSight(last) {
    const isEnd = last + 10 >= finished.list.length && finished.list.length >= finished.wanted;
    if (!isEnd || finished.wanted >= KEPT) return;
    finished.wanted = Math.min(KEPT, 4 * finished.wanted);
    fetchFinished();
  },
});

/* Fetches the list if it is not up to date, at most twice per second. If that fails, the next poll
   says what is wrong. */
async function fetchFinished() {
  const { wanted, isBusy } = finished;
  const seen = engine.state.num_finished;
  if (isBusy || (finished.seen === seen && finished.asked === wanted)) return;
  finished.isBusy = true;
  try {
    const answer = await call(ofModel(`v1/requests?limit=${wanted}`));
    Object.assign(finished, { list: (await answer.json()).data, asked: wanted, seen });
    showFinished();
  } catch {
    /* see above */
  }
  await sleep(500);
  finished.isBusy = false;
}

function showFinished() {
  const { list } = finished;
  $("recent").hidden = !list.length;
  $("no-recent").hidden = list.length > 0;
  listFinished(list);
}
