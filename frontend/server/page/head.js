"use strict";
/* Makes the head of the page: theme, API key, and on a phone the choice between chat and engine. */

const themes = { "": "Theme: auto", light: "Theme: light", dark: "Theme: dark" };
function setTheme(theme) {
  const root = document.documentElement;
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  put($("theme"), themes[theme]);
  remember(browserStore, "quire-theme", theme);
  redraw();
}
$("theme").onclick = () => {
  const names = Object.keys(themes);
  const now = names.indexOf(document.documentElement.dataset.theme || "");
  setTheme(names[(now + 1) % names.length]);
};
matchMedia("(prefers-color-scheme: dark)").onchange = () => redraw();

/* Makes a button open and close a panel below it. Escape and a click elsewhere close it. */
const panels = [];
function panel(button, box, { onOpen }) {
  const show = (open, { focus = true } = {}) => {
    if (box.hidden === !open) return;
    box.hidden = !open;
    button.setAttribute("aria-expanded", open);
    if (open) onOpen();
    else if (focus) button.focus();
  };
  button.onclick = () => show(box.hidden);
  panels.push({ button, box, show });
  return show;
}
document.addEventListener("pointerdown", ({ target }) => {
  for (const { button, box, show } of panels)
    if (!box.contains(target) && !button.contains(target)) show(false, { focus: false });
});
/* Closes the panels. Returns whether one was open. */
function closePanels() {
  const open = panels.filter(({ box }) => !box.hidden);
  for (const { show } of open) show(false);
  return open.length > 0;
}

const showKey = panel($("key-open"), $("key-form"), { onOpen: () => $("key").focus() });
$("key").value = apiKey;
/* Shows what the server said of the key; null means that it takes it. */
function tellKey(error) {
  const isWrong = Boolean(error && apiKey);
  $("key").setAttribute("aria-invalid", isWrong);
  $("key-told").hidden = !isWrong;
  put($("key-told"), isWrong ? `The server does not accept this key. ${error.message}` : "");
  if (isWrong && error.status === 401 && apiKey !== toldKey) showKey(true);
  if (isWrong) toldKey = apiKey;
}
let toldKey = ""; // a key that was refused before does not open the form again
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  apiKey = $("key").value.trim();
  remember(tabStore, "quire-key", apiKey);
  showKey(false);
  poke();
};

function view(name) {
  document.body.dataset.view = name;
  for (const other of ["chat", "engine"])
    $(`tab-${other}`).setAttribute("aria-pressed", other === name);
  redraw();
  poke();
}
$("tab-chat").onclick = () => view("chat");
$("tab-engine").onclick = () => view("engine");
