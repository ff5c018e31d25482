"use strict";
/* Makes the button that traces a step, and shows the step's flame chart. */

const TRACE_PROMPT = "Once upon a time"; // completed where no request runs

async function traceStep() {
  const button = $("trace-step");
  button.disabled = true;
  put($("trace-told"), "Recording…");
  try {
    const prompt = engine.idle ? { prompt: TRACE_PROMPT } : {};
    const answer = await post("v1/engine/trace", { steps: 2, timeout_s: 10, ...prompt });
    const { steps, limits, notes } = (await answer.json()).engine;
    const last = steps.at(-1);
    $("flame").replaceChildren(...(last ? [flameChart(last, limits)] : []));
    put($("trace-told"), last ? notes.join("; ") : "No step was made within ten seconds.");
  } catch (error) {
    put($("trace-told"), error instanceof Refusal ? error.message : inWords(error));
  }
  button.disabled = false;
}
$("trace-step").onclick = traceStep;
