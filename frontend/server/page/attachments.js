"use strict";
/* Takes pictures for the next message: chosen, pasted or dropped. A picture is a data URL, which is
   what is sent, shown and stored, so it is made small enough for all three. */

const MAX_SIDE = 2048; // pixels of the longer side
const MAX_LENGTH = 1_000_000; // characters of the data URL; a browser stores about five millions
const MAX_ATTACHED = 8; // pictures in one message
const READABLE = /^image\/(png|jpeg|webp|gif|bmp)$/;
let attached = []; // data URLs

/* For a model that is not loaded, the list of models says it. */
function readsImages() {
  const { state, listed } = engine;
  const card = listed.find(({ id }) => id === chosenModel) || listed[0] || {};
  return state?.reads_images ?? card.capabilities?.includes("vision") ?? false;
}
const takesImages = () => readsImages() && mode() === "chat";

function readUrl(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(file);
  });
}

/* Returns the picture as it is if it is small, otherwise as a smaller JPEG on white. */
async function smallUrl(file) {
  const bitmap = await createImageBitmap(file);
  const { width, height } = bitmap;
  let scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  if (scale === 1 && file.size < 0.7 * MAX_LENGTH) return readUrl(file);
  for (let quality = 0.92; ; quality -= 0.1) {
    const canvas = h("canvas", {
      width: Math.max(1, Math.round(width * scale)),
      height: Math.max(1, Math.round(height * scale)),
    });
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    const url = canvas.toDataURL("image/jpeg", quality);
    if (url.length <= MAX_LENGTH) return url;
    if (quality < 0.6) scale *= 0.7;
  }
}

function tellAttached(words) {
  put($("attached-told"), words);
  $("attached-told").hidden = !words;
}

async function attach(files) {
  if (!takesImages()) {
    const isChat = mode() === "chat";
    tellAttached(isChat ? "This model reads text only." : "Pictures can be sent in the mode chat.");
    return;
  }
  tellAttached("");
  for (const file of files) {
    if (attached.length >= MAX_ATTACHED) {
      tellAttached(`A message takes ${MAX_ATTACHED} pictures.`);
      break;
    }
    try {
      if (!READABLE.test(file.type)) throw new TypeError(file.type);
      attached.push(await smallUrl(file));
    } catch {
      tellAttached(`${file.name || "This"} is not a picture that can be read.`);
    }
  }
  showAttached();
  $("prompt").focus();
}

function setAttached(urls) {
  attached = [...urls];
  tellAttached("");
  showAttached();
}

function thumbnail(url, i, all) {
  const alt = all.length > 1 ? `Picture ${i + 1} of ${all.length}` : "Picture";
  return h("img", { src: url, alt });
}

/* Returns the pictures of a message, small. */
function thumbnails(urls) {
  return h("div", { className: "thumbnails" }, ...urls.map(thumbnail));
}

function showAttached() {
  $("attached").hidden = !attached.length;
  $("attached").replaceChildren(
    ...attached.map((url, i) => {
      const drop = h("button", { type: "button", className: "plain", textContent: "×" });
      drop.setAttribute("aria-label", `Remove picture ${i + 1}`);
      drop.onclick = () => {
        setAttached(attached.filter((_, other) => other !== i));
        $("prompt").focus();
      };
      return h("li", {}, thumbnail(url, i, attached), drop);
    }),
  );
}

/* The content of a message: text, or parts if it has pictures. */
function contentOf({ content, images }) {
  if (!images?.length) return content;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

$("attach").onclick = () => $("attach-file").click();
$("attach-file").onchange = () => {
  attach([...$("attach-file").files]);
  $("attach-file").value = "";
};
$("prompt").onpaste = (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return;
  event.preventDefault();
  attach(files);
};

/* A dropped file would otherwise replace the page. */
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
document.addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  $("composer").classList.toggle("dropping", takesImages());
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("composer").classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  $("composer").classList.remove("dropping");
  if (!hasFiles(event)) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
