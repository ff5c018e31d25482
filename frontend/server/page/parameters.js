"use strict";
/* Reads the sampling parameters of the next request. An empty field leaves it to the server. */

const FIELDS = [
  ["system", "System prompt", "text"],
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["repetition_penalty", "Repetition", { min: 0, max: 2, step: "any" }],
  ["stop", "Stop before", "line"],
];
const fields = {};
for (const [name, label, kind] of FIELDS) {
  const numeric = { type: "number", inputMode: "decimal", ...kind };
  const input =
    kind === "text" ? h("textarea", { rows: 2 }) : h("input", kind === "line" ? {} : numeric);
  fields[name] = input;
  input.name = name;
  input.placeholder = kind === "text" ? "none" : "default";
  input.value = recall(browserStore, `quire-${name}`);
  input.onchange = () => remember(browserStore, `quire-${name}`, input.value);
  $("fields").append(h("label", { className: kind === "text" ? "wide" : "" }, label, input));
}

/* Shows what applies to a field that is left empty: the server's defaults for this model. */
function showDefaults({ default_sampling_params: defaults, max_model_len }, isChat) {
  const shown = {
    ...defaults,
    top_k: defaults.top_k > 0 ? defaults.top_k : "all",
    max_tokens: isChat ? (defaults.max_tokens ?? `≤ ${whole(max_model_len)}`) : COMPLETION_TOKENS,
    seed: "random",
    stop: "none",
  };
  for (const name of Object.keys(fields))
    if (name !== "system") fields[name].placeholder = String(shown[name] ?? "default");
}

function showParameters(open) {
  $("parameters").hidden = !open;
  $("parameters-open").setAttribute("aria-expanded", open);
}
$("parameters-open").onclick = () => {
  showParameters($("parameters").hidden);
  if (!$("parameters").hidden) $("fields").querySelector("label:not([hidden]) > *").focus();
};

/* Returns the fields that are filled in, as the body of a request takes them. */
function parameters() {
  const chosen = {};
  for (const [name, , kind] of FIELDS) {
    const value = fields[name].value;
    if (name === "system" || value.trim() === "") continue;
    chosen[name] = kind === "line" ? value : Number(value);
  }
  return chosen;
}

/* Returns false, and shows the field with what is wrong in it, if one is outside its range. */
function checkParameters() {
  const wrong = Object.values(fields).find((input) => !input.checkValidity());
  if (!wrong) return true;
  showParameters(true);
  wrong.reportValidity();
  return false;
}
