"use strict";
/* Shows one request in a dialog: where it is, or how it went, with a picture and a Chrome trace. */

const life = { id: "", isLive: false };

async function openLife(id) {
  Object.assign(life, { id, isLive: false });
  put($("life-title"), id);
  for (const part of ["life-picture", "life-events"]) $(part).replaceChildren();
  put($("life-told"), "");
  $("life-trace").parentElement.hidden = true;
  if (!$("life").open) $("life").showModal();
  await showLife();
}

async function showLife() {
  const { id } = life;
  const requests = engine.state?.requests || [];
  const here = requests.filter((request) => userId(request.request_id) === id);
  life.isLive = here.length > 0;
  if (life.isLive) {
    put($("life-told"), tellLive(here));
    return;
  }
  let story;
  for (let attempt = 0; !story; attempt++) {
    try {
      story = await (await call(ofModel(`v1/requests/${encodeURIComponent(id)}`))).json();
    } catch (error) {
      if (life.id !== id) return;
      if (error.status === 404 && attempt < 4) {
        await sleep(150); // an answer may be complete before its end is noted
        continue;
      }
      put($("life-told"), inWords(error));
      return;
    }
  }
  if (life.id !== id) return;
  $("life-trace").parentElement.hidden = false;
  put($("life-told"), tellStory(story));
  $("life-picture").replaceChildren(picture(story));
  $("life-events").replaceChildren(eventTable(story));
}

function tellLive(requests) {
  const [request] = requests;
  const { num_prompt_tokens: prompt } = request;
  const output = requests.reduce((sum, one) => sum + one.num_output_tokens, 0);
  const parts = [
    request.state === "running" ? "running" : STATES[request.state] || request.state,
    `${whole(Math.min(request.num_computed_tokens, prompt))} of ${whole(prompt)} prompt tokens computed`,
    several(output, "output token"),
    several(request.num_blocks, "block"),
  ];
  return `In the engine: ${parts.join(", ")}. The time line follows when the request has finished.`;
}

const endOf = (story) => ENDED[story.finish_reason] || story.finish_reason;

function tellStory(story) {
  const chunks = story.events.filter((event) => event.name === "prefill_chunk").length;
  const prompt = [
    `${several(story.prompt_tokens, "prompt token")} took ${seconds(story.prefill_s)}`,
  ];
  if (chunks > 1) prompt.push(` in ${chunks} chunks`);
  if (story.cached_tokens) prompt.push(`, ${whole(story.cached_tokens)} of them from the cache`);
  const output = several(story.completion_tokens, "output token");
  const parts = [
    `Waited ${seconds(story.queued_s)}`,
    prompt.join(""),
    story.decode_s ? `${output} took ${seconds(story.decode_s)}` : output,
  ];
  if (story.num_preemptions) {
    const again = several(story.num_recomputed_tokens, "token");
    parts.push(`preempted ${times(story.num_preemptions)}, ${again} computed again`);
  }
  return `${parts.join("; ")}. Ended by ${endOf(story)} after ${seconds(story.e2e_s)}.`;
}

/* ---------------------------------------------------------------- the picture */

const SVG = "http://www.w3.org/2000/svg";
function make(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

const LANES = ["queue", "prompt", "output"];
const LEFT = 56;
const TALL = 30;

function picture(story) {
  const width = Math.max(280, $("life-picture").clientWidth);
  const bottom = LANES.length * TALL;
  const end = Math.max(1e-6, ...story.events.map((event) => event.end_s ?? event.begin_s));
  const x = (s) => LEFT + ((width - LEFT - 6) * s) / end;
  const label = "Time line; the table below has the same content";
  const viewBox = `0 0 ${width} ${bottom + 28}`;
  const svg = make("svg", { viewBox, role: "img", "aria-label": label });
  LANES.forEach((lane, i) => {
    const place = { x: LEFT, y: i * TALL + 4, width: width - LEFT - 6, height: TALL - 8, rx: 2 };
    svg.append(make("rect", { class: "f-lane", ...place }));
    svg.append(make("text", { x: 0, y: i * TALL + 19 }, lane));
  });
  const box = (lane, kind, event, words) => {
    const from = x(event.begin_s);
    const wide = Math.max(1, x(event.end_s) - from - 0.6);
    const place = { x: from, y: lane * TALL + 4, width: wide, height: TALL - 8 };
    const rect = make("rect", { class: `f-${kind}`, ...place });
    rect.append(make("title", {}, words));
    svg.append(rect);
  };
  const line = (kind, at, y1, y2) =>
    svg.append(make("line", { class: `l-${kind}`, x1: at, x2: at, y1, y2 }));
  const draw = {
    queued: (event, took) => box(0, "waiting", event, `queued for ${took}`),
    cached: (event) => {
      const place = { x: x(event.begin_s), y: TALL + 4, width: 4, height: TALL - 8 };
      svg.append(make("rect", { class: "f-cached", ...place }));
    },
    prefill_chunk: (event, took) => {
      const words = `step ${event.step}: ${several(event.num_tokens, "token")} in ${took}`;
      box(1, "prompt", event, words);
    },
    decode: (event, took) => box(2, "output", event, `output for ${took}`),
    decode_step: (event, took) =>
      box(2, "output", event, `${several(event.num_tokens, "token")} after ${took}`),
    preempted: (event) => line("preempted", x(event.begin_s), 0, bottom),
    first_token: (event) => line("first", x(event.begin_s), 0, bottom),
  };
  for (const event of story.events)
    draw[event.name]?.(event, event.end_s == null ? "" : seconds(event.end_s - event.begin_s));
  for (let i = 0; i <= 4; i++) {
    const at = x((end * i) / 4);
    const anchor = i === 4 ? "end" : i ? "middle" : "start";
    line("axis", at, bottom, bottom + 5);
    const place = { x: at, y: bottom + 19, "text-anchor": anchor };
    svg.append(make("text", place, i ? seconds((end * i) / 4) : "0"));
  }
  return svg;
}

function eventTable(story) {
  const words = {
    queued: () => "in the queue",
    cached: (e) => `${several(e.num_tokens, "prompt token")} found in the prefix cache`,
    prefill_chunk: (e) => `step ${whole(e.step)}: ${several(e.num_tokens, "prompt token")}`,
    first_token: () => "first output token",
    preempted: () => "preempted: other requests need its blocks",
    decode: () => "output",
    finished: () => `ended by ${endOf(story)}`,
  };
  const cell = (textContent) => h("td", { textContent });
  const took = (event) => (event.end_s == null ? "" : seconds(event.end_s - event.begin_s));
  const rows = story.events
    .filter((event) => words[event.name])
    .map((event) => {
      const at = cell(seconds(event.begin_s));
      return h("tr", {}, cell(words[event.name](event)), at, cell(took(event)));
    });
  const heads = ["what", "at", "for"].map((textContent) => h("th", { scope: "col", textContent }));
  const head = h("thead", {}, h("tr", {}, ...heads));
  const table = h("table", {}, head, h("tbody", {}, ...rows));
  return h("div", { className: "events", tabIndex: 0 }, table);
}

/* ---------------------------------------------------------------- the dialog */

$("life-close").onclick = () => $("life").close();
$("life").onclose = () => Object.assign(life, { id: "", isLive: false });
$("life").onclick = (event) => event.target === $("life") && $("life").close();
$("life-trace").onclick = async () => {
  try {
    const path = ofModel(`v1/requests/${encodeURIComponent(life.id)}/trace`);
    const href = URL.createObjectURL(await (await call(path)).blob());
    h("a", { href, download: `${life.id}.trace.json` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10000);
  } catch (error) {
    put($("life-told"), inWords(error));
  }
};
