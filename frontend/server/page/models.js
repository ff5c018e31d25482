"use strict";
/* Lets the user choose between the models of a server that has several. */

async function offerModels() {
  try {
    engine.listed = (await (await call("v1/models")).json()).data;
  } catch {
    return; // one model, which is loading; or a key is needed, and the next one asks again
  }
  const names = engine.listed.map(({ id }) => id);
  showMode();
  if (chosenModel && !names.includes(chosenModel)) {
    chosenModel = "";
    remember(browserStore, "quire-model", "");
    poke();
  }
  if (names.length < 2) return;
  const options = names.map((name) => h("option", { value: name, textContent: name }));
  $("models").replaceChildren(...options);
  $("models").value = chosenModel || names[0];
  $("models").hidden = false;
  $("model").hidden = true;
}

/* Nothing that is shown of one engine is true of another, so the page begins anew. */
$("models").onchange = () => {
  remember(browserStore, "quire-model", $("models").value);
  location.reload();
};
$("key-form").addEventListener("submit", offerModels);
