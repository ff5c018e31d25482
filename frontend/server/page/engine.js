"use strict";
/* Polls the engine: its health, its figures, its counters. A hidden tab polls nothing. */

const engine = {
  model: "",
  state: null, // the last answer of /v1/engine/state
  listed: [], // the models, as /v1/models lists them
  samples: [], // { time, output, prompt }: the token counters of the last minute
  steps: [],
  since: -1,
  idle: true,
};
let timer = 0;
let asking = null; // the AbortController of the poll under way
let askAgain = false;

const isHidden = () => document.visibilityState === "hidden";

/* Polls now, or as soon as the poll under way has ended. */
function poke() {
  if (asking) {
    askAgain = true;
    return;
  }
  clearTimeout(timer);
  if (!isHidden()) poll();
}
document.addEventListener("visibilitychange", () => {
  if (!isHidden()) return poke();
  clearTimeout(timer);
  asking?.abort();
  flush(); // a phone may end the page without another word
});

async function poll() {
  asking = new AbortController();
  const begin = performance.now();
  let wait;
  try {
    const path = `v1/engine/state?errors=body&since=${engine.since}`;
    const answer = await call(ofModel(path), { signal: asking.signal });
    const state = await answer.json();
    if (state.error) throw new Refusal(state.error.message, 503, state);
    tellKey(null);
    take(state);
    health("ready");
    const isUnseen = narrow.matches && document.body.dataset.view === "chat";
    wait = engine.idle ? 1000 : isUnseen ? 700 : 250;
    wait = Math.max(wait, 4 * (performance.now() - begin)); // thousands of requests take longer
  } catch (error) {
    wait = error.name === "AbortError" ? 0 : trouble(error);
  }
  asking = null;
  if (askAgain) wait = Math.min(wait, 60);
  askAgain = false;
  if (!isHidden()) timer = setTimeout(poll, wait);
}

function health(is, words) {
  const ready = engine.idle ? "idle" : "at work";
  const others = { absent: "not loaded", gone: "no engine", locked: apiKey ? "wrong API key" : "asks for a key" };
  const labels = { ready, loading: "loading", ...others };
  $("health").dataset.is = is;
  put($("health"), labels[is] || "connecting");
  const isTold = is === "loading" || is === "gone";
  $("engine").classList.toggle("stale", is !== "ready");
  $("notice").hidden = !isTold;
  if (!isTold) return;
  $("notice").dataset.is = is;
  put($("notice-text"), words);
}

/* Shows what is wrong. Returns the milliseconds until the next poll. */
function trouble(error) {
  if (error.status === 401 || error.status === 403) {
    health("locked");
    tellKey(error);
    return 60_000; // the form asks at once
  }
  if (error.body?.error?.code === "model_not_loaded") {
    health("absent"); // the next message loads it
    return 1000;
  }
  const isLoading = error.body?.error?.code === "model_loading";
  $("notice-bar").hidden = !isLoading;
  if (isLoading) {
    health("loading", error.message);
    $("notice-bar").value = Number(/(\d+)\s?%/.exec(error.message)?.[1] ?? 0);
    return 400;
  }
  const isRefusal = error instanceof Refusal;
  if (!isRefusal) health("gone", `The server's answer is not readable: ${error.message}`);
  else if (error.status) health("gone", `The engine does not work: ${error.message}`);
  else health("gone", `${error.message} The page asks again every two seconds.`);
  return 2000;
}

/* ---------------------------------------------------------------- what is shown */

function take(state) {
  const before = engine.state;
  const isAnother = before && state.step < before.step; // the engine was started again
  if (isAnother) Object.assign(engine, { steps: [], samples: [] });
  engine.state = state;
  engine.model = state.model;
  engine.since = state.step;
  engine.steps = engine.steps.concat(state.steps).slice(-240);
  engine.idle = state.requests.length + state.num_queued === 0;
  const { counters, time } = state;
  const { num_generation_tokens: output, num_prompt_tokens: prompt } = counters;
  engine.samples.push({ time, output, prompt });
  while (engine.samples.length > 2 && engine.samples[1].time < time - 62) engine.samples.shift();
  showMode();
  figures(state);
  showRequests(state);
  fetchFinished();
  fetchExperts(state);
  counts(counters);
  noteBlocks(state);
  redraw();
}

/* Returns tokens per second over the second (or the poll) that ends with sample i. */
function rate(i, name) {
  const { samples } = engine;
  let j = i;
  while (j > 0 && samples[i].time - samples[j].time < 0.8) j--;
  if (i === j) return 0;
  return (samples[i][name] - samples[j][name]) / (samples[i].time - samples[j].time);
}

function upTime(s) {
  const hours = Math.floor(s / 3600);
  const minutes = Math.floor(s / 60) % 60;
  if (hours) return `${several(hours, "hour")} ${several(minutes, "minute")}`;
  return minutes ? several(minutes, "minute") : several(Math.floor(s), "second");
}

function figures(state) {
  const { counters, requests } = state;
  const last = engine.samples.length - 1;
  const output = whole(rate(last, "output"));
  const live = requests.filter((request) => request.state === "running").length;
  const all = requests.length + state.num_queued;
  document.title = engine.idle ? `Quire, ${state.model}` : `${output} tokens/s, Quire`;
  put($("model"), state.model);
  put($("tab-engine"), all ? `Engine (${whole(all)})` : "Engine");
  put($("rate"), output);
  put($("prefill-rate"), `${whole(rate(last, "prompt"))} prompt tokens per second`);
  put($("running"), whole(live));
  put($("waiting"), whole(all - live));
  put($("finished"), whole(state.num_finished));
  const usage = state.num_blocks > 1 ? 1 - counters.num_free_blocks / (state.num_blocks - 1) : 0;
  put($("usage"), `${(100 * usage).toFixed(usage && usage < 0.1 ? 1 : 0)} %`);
  const { prefix_cache_hits: hits, prefix_cache_queries: queries } = counters;
  put($("hits"), queries ? `${Math.round((100 * hits) / queries)} %` : "–");
  put($("preemptions"), whole(counters.num_preemptions));
  const context = `a context of ${whole(state.max_model_len)} tokens`;
  const { num_draft_tokens: drafted, num_accepted_tokens: accepted } = counters;
  const drafts = drafted ? `, ${Math.round((100 * accepted) / drafted)} % of drafts accepted` : "";
  const blocks = `${whole(state.num_blocks)} blocks of ${state.block_size} tokens`;
  const sizes = `${context}, ${blocks}${drafts}`;
  put($("about"), `Up ${upTime(state.uptime_s)}, ${sizes}.${adaptersOf(state)}`);
  showRestarts(state);
}

/* Tells which adapters are served and which are in use. */
function adaptersOf({ loras, adapters }) {
  if (!adapters?.max_loras) return "";
  const { num_in_memory: n, max_cpu_loras: room, running, waiting } = adapters;
  const list = (word, names) => (names.length ? `; ${word}: ${names.join(", ")}` : "");
  const uses = list("running", running) + list("waiting", waiting);
  return ` ${whole(n)} of ${whole(room)} adapters in memory${list("served", loras)}${uses}.`;
}

/* Shows the engines that have died, the gap that a stream saw last, and the standby. */
function showRestarts({ restarts = {}, counters, last_gap_s: gap, standby_is_ready: isReady }) {
  const causes = Object.entries(restarts).map(([cause, times]) => `${cause} ${whole(times)}`);
  const words = [];
  if (causes.length) {
    const resumed = `${several(counters.num_requests_resumed, "request")} resumed`;
    const last = gap == null ? "" : `, the last after ${gap.toFixed(2)} s`;
    words.push(`Engine restarts: ${causes.join(", ")}; ${resumed}${last}.`);
  }
  if (isReady != null) words.push(isReady ? "A standby is ready." : "The standby is starting.");
  $("restarts").hidden = !words.length;
  put($("restarts"), words.join(" "));
}

function counts(counters) {
  if (!$("counters-box").open) return;
  const names = Object.keys(counters);
  if ($("counters").children.length !== names.length) {
    const words = (name) => name.replace(/^num_/, "").replaceAll("_", " ");
    const entry = (name) => h("div", {}, h("dt", { textContent: words(name) }), h("dd"));
    $("counters").replaceChildren(...names.map(entry));
  }
  names.forEach((name, i) => put($("counters").children[i].lastChild, whole(counters[name])));
}
$("counters-box").ontoggle = () => engine.state && counts(engine.state.counters);
