"use strict";
/* Keeps conversations in this browser alone. Each has its own entry in the storage, so that tabs
   do not overwrite each other's. The tab remembers which one it shows, so a reload keeps it. */

const ENTRY = "quire-conversation-";
const KEPT_WHERE =
  browserStore === memory
    ? "The browser forbids storage: kept until this page is left."
    : browserStore === tabStore
      ? "Kept in this tab until it is closed."
      : "Kept in this browser only.";
let conversation = newConversation();
let deleted = []; // entries that "Undo" brings back

function newConversation() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return { id, title: "", mode: "", model: "", changed: 0, turns: [] };
}

/* Returns the stored conversation, or null for an entry that is missing or is not this page's. */
function stored(name) {
  try {
    const found = JSON.parse(browserStore.getItem(name));
    return Array.isArray(found?.turns) && ENTRY + found.id === name ? found : null;
  } catch {
    return null;
  }
}

/* Returns all that are stored, latest first. */
function storedConversations() {
  const names = Array.from({ length: browserStore.length }, (_, i) => browserStore.key(i));
  const found = names.filter((name) => name.startsWith(ENTRY)).map(stored);
  return found.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

const titleOf = ({ content, images }) =>
  content.trim().replace(/\s+/g, " ").slice(0, 90) || (images?.length ? "Picture" : "");

/* Stores the conversation that is shown. If the quota is used up, the oldest others give way. */
function save() {
  if (!turns.length) return;
  Object.assign(conversation, {
    title: conversation.isNamed ? conversation.title : titleOf(turns[0]),
    model: engine.model,
    changed: Date.now(),
    turns: turns.map(({ role, content, images, reasoning, plain, told, stopped, failure }) => {
      return { role, content, images, reasoning, plain, told, stopped, failure };
    }),
  });
  put($("title"), conversation.title);
  const text = JSON.stringify(conversation);
  let others = null;
  while (!remember(browserStore, ENTRY + conversation.id, text)) {
    others ??= storedConversations().filter(({ id }) => id !== conversation.id);
    if (!others.length) {
      put($("list-told"), "The browser's storage is full. This conversation is not kept.");
      return;
    }
    browserStore.removeItem(ENTRY + others.pop().id);
    put($("list-told"), "The browser's storage is full. The oldest conversations were dropped.");
  }
  remember(tabStore, "quire-shown", conversation.id);
}

let saving = 0;
function saveSoon() {
  saving ||= setTimeout(saveNow, 1000);
}
function saveNow() {
  clearTimeout(saving);
  saving = 0;
  save();
}
/* Stores what saveSoon() was asked for, and nothing if there is nothing new. */
function flush() {
  if (saving) saveNow();
}
addEventListener("pagehide", () => {
  running?.abort(); // so that the end of the page does not look like a failure of the server
  flush();
});

/* Shows `next` in place of what is shown; a request that runs for that one is stopped. */
function showConversation(next) {
  running?.abort();
  flush();
  endEdit();
  setAttached([]);
  clearTurns();
  conversation = next;
  remember(tabStore, "quire-shown", next.id);
  put($("title"), next.title);
  for (const turn of next.turns) restoreTurn(turn);
  showMode();
  toEnd();
}

function startNew() {
  showConversation(newConversation());
  showList(false, { focus: false });
  $("prompt").focus();
}
$("new").onclick = startNew;

/* ---------------------------------------------------------------- the list */

const showList = panel($("list-open"), $("list"), {
  onOpen() {
    deleted = [];
    put($("list-told"), "");
    $("list-search").value = "";
    listConversations();
    ($("list-rows").querySelector("button") || $("list-open")).focus();
  },
});

function when(time) {
  const date = new Date(time);
  const isToday = date.toDateString() === new Date().toDateString();
  const form = isToday ? { timeStyle: "short" } : { dateStyle: "medium" };
  return date.toLocaleString("en-GB", form);
}

/* Tells whether a conversation has all words of the search, in its title or its messages. */
function matches(one, words) {
  const text = [one.title, ...one.turns.map((turn) => turn.content)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}
$("list-search").oninput = () => listConversations();

function saveFile(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}
const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation";

/* Saves a conversation as Markdown, or all as JSON, which has what the page knows of them. */
function exportOne(one) {
  const parts = one.turns.map(({ role, content, images = [] }) => {
    const shown = [...images.map((url) => `![Picture](${url})`), content].join("\n\n");
    return `## ${role === "user" ? "You" : "Answer"}\n\n${shown}\n`;
  });
  const about = [when(one.changed), one.model].filter(Boolean).join(", ");
  const text = `# ${one.title || "Untitled"}\n\n${about}\n\n${parts.join("\n")}`;
  saveFile(`${fileName(one.title)}.md`, "text/markdown", text);
}
$("export-all").onclick = () =>
  saveFile("conversations.json", "application/json", JSON.stringify(storedConversations(), null, 1));

/* Puts a field in the place of the title of a row. Enter takes the name, Escape leaves it. */
function rename(one, row) {
  const field = h("input", { value: one.title, maxLength: 90 });
  field.setAttribute("aria-label", "Name of the conversation");
  const box = h("form", { className: "pick" }, field);
  let isOver = false;
  const end = (title) => {
    if (isOver) return;
    isOver = true;
    const now = title.trim() && stored(ENTRY + one.id);
    if (now) {
      Object.assign(now, { title: title.trim(), isNamed: true });
      remember(browserStore, ENTRY + one.id, JSON.stringify(now));
      if (one.id === conversation.id) {
        Object.assign(conversation, { title: now.title, isNamed: true });
        put($("title"), now.title);
      }
    }
    listConversations();
  };
  box.onsubmit = (event) => {
    event.preventDefault();
    end(field.value);
  };
  field.onkeydown = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    end("");
  };
  field.onblur = () => end(field.value);
  row.querySelector(".pick").replaceWith(box);
  field.select();
  field.focus();
}

function listConversations() {
  const every = storedConversations();
  const words = $("list-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = every.filter((one) => matches(one, words));
  $("list-search").hidden = every.length < 2;
  $("export-all").hidden = !every.length;
  $("list-rows").replaceChildren(
    ...all.map((one) => {
      const title = h("span", { className: "name", textContent: one.title || "Untitled" });
      const number = several(one.turns.filter((turn) => turn.role === "user").length, "message");
      const about = [when(one.changed), number, one.model].filter(Boolean).join(", ");
      const pick = h(
        "button",
        { type: "button", className: "pick", onclick: () => choose(one) },
        title,
        h("span", { className: "soft small", textContent: about }),
      );
      if (one.id === conversation.id) pick.setAttribute("aria-current", "true");
      const drop = h("button", { type: "button", className: "plain", textContent: "Delete" });
      drop.setAttribute("aria-label", `Delete “${one.title}”`);
      drop.onclick = () => deleteConversations([one]);
      const name = button("Rename", () => rename(one, row));
      name.setAttribute("aria-label", `Rename “${one.title}”`);
      const file = button("Export", () => exportOne(stored(ENTRY + one.id) || one));
      file.setAttribute("aria-label", `Export “${one.title}”`);
      const row = h("li", {}, pick, h("span", { className: "row-buttons" }, name, file, drop));
      return row;
    }),
  );
  $("delete-all").hidden = every.length < 2;
  $("undo").hidden = !deleted.length;
  if (deleted.length) put($("list-told"), `Deleted ${several(deleted.length, "conversation")}.`);
  else if (words.length) put($("list-told"), `${whole(all.length)} of ${whole(every.length)} match.`);
  else if (!$("list-told").textContent || / match\.$/.test($("list-told").textContent))
    put($("list-told"), every.length ? KEPT_WHERE : "No conversation yet.");
}

function choose(one) {
  if (one.id !== conversation.id) showConversation(stored(ENTRY + one.id) || one);
  showList(false, { focus: false });
  $("prompt").focus();
}

function deleteConversations(some) {
  if (some.some(({ id }) => id === conversation.id)) {
    running?.abort();
    flush(); // what a stream has brought so far is there for "Undo"
    some = some.map((one) => (one.id === conversation.id ? { ...conversation } : one));
    clearTurns();
    showConversation(newConversation());
  }
  deleted = some;
  for (const { id } of some) browserStore.removeItem(ENTRY + id);
  listConversations();
  $("undo").focus();
}
$("delete-all").onclick = () => deleteConversations(storedConversations());
$("undo").onclick = () => {
  for (const one of deleted) remember(browserStore, ENTRY + one.id, JSON.stringify(one));
  deleted = [];
  put($("list-told"), "");
  listConversations();
  ($("list-rows").querySelector("button") || $("list-open")).focus();
};
addEventListener("storage", () => !$("list").hidden && listConversations()); // another tab's change
