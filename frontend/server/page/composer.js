"use strict";
/* Writes and sends messages: the message box, its keys, and the twelve requests of the burst. */

function showSend() {
  put($("send"), running ? "Stop" : WORDS[mode()].send);
  $("send").classList.toggle("main", !running);
}

function send(text) {
  const images = mode() === "chat" ? attached : [];
  if (running || !(text.trim() || images.length) || !checkParameters()) return;
  if (editing) {
    dropFrom(editing);
    endEdit();
  }
  // A chat template sets its own white space; of a text to complete each space counts.
  addTurn("user", mode() === "chat" ? text.trim() : text, images.length ? { images } : {});
  $("prompt").value = "";
  setAttached([]);
  grow();
  answer();
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send($("prompt").value);
};
function grow() {
  const box = $("prompt");
  box.rows = 1;
  box.rows = Math.min(9, Math.max(1, Math.round((box.scrollHeight - 12) / 24)));
}
$("prompt").oninput = grow;
$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) send($("prompt").value);
};
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("life").open || closePanels()) return;
  if (running) running.abort();
  else if (editing) {
    endEdit();
    $("prompt").value = "";
    setAttached([]);
    grow();
  }
});

/* Sends twelve requests that begin alike, to show prefills, shared blocks and cache hits. Their
   answers are not read. Two calls carry them, since a browser opens at most six connections to a
   server. */
const OPENING =
  "Once upon a time, in a small town between the hills and the sea, where the wind was never " +
  "still and everybody knew everybody, ";
const HEROES = (
  "a fox,a lighthouse keeper,the rain,an old boat,two cats,a baker," +
  "the moon,a bridge,a whale,a postman,a school,a clock"
).split(",");
let burst = null;
let burstFailed = "";
$("burst").onclick = async () => {
  if (burst) {
    burst.abort();
    return;
  }
  burst = new AbortController();
  const { signal } = burst;
  const half = async (some, max_tokens, after) => {
    await sleep(after);
    const prompt = some.map((hero) => `${OPENING.repeat(2)}there was ${hero} who`);
    await (await post("v1/completions", { prompt, max_tokens, ignore_eos: true }, signal)).json();
  };
  burstFailed = "";
  for (const ms of [50, 250]) setTimeout(poke, ms);
  try {
    const room = Math.max(16, (engine.state?.max_model_len ?? 512) - 160); // the prompts take 80
    const [some, more] = [Math.min(700, room), Math.min(900, room)];
    await Promise.all([half(HEROES.slice(0, 6), some, 0), half(HEROES.slice(6), more, 150)]);
  } catch (error) {
    if (error.name !== "AbortError") burstFailed = inWords(error);
    burst.abort();
  }
  burst = null;
  poke();
};
