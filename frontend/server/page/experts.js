"use strict";
/* Shows how a model's tokens were spread over its experts: a row per layer, a column per expert.
   Models without experts have no such picture. */

const EXPERTS_EVERY_MS = 1000;
const LAYER_AXIS = 26;
const experts = { layers: [], tokens: [], shares: [], step: -1, asked: -Infinity, drawn: "" };

/* Asks when steps were made since the last answer; a model without experts is asked once. */
async function fetchExperts(state) {
  const isKnown = experts.step >= 0 && state.step >= experts.step;
  if (isKnown && (!experts.layers.length || state.step === experts.step)) return;
  if (performance.now() - experts.asked < EXPERTS_EVERY_MS) return;
  experts.asked = performance.now();
  try {
    const answer = await call(ofModel("v1/engine/experts"));
    Object.assign(experts, await answer.json(), { step: state.step });
  } catch {
    return; // the poll of the state tells what is wrong
  }
  experts.shares = experts.tokens.map(sharesOf);
  $("experts-box").hidden = !experts.layers.length;
  redraw();
}

/* Returns the share of a layer's tokens that each expert has. */
function sharesOf(tokens) {
  const all = tokens.reduce((total, n) => total + n, 0);
  return tokens.map((n) => (all ? n / all : 0));
}
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const overEven = (times) => `${times.toFixed(1)} times an even share`;

/* Returns the busiest expert of all layers, by its share over an even one. */
function busiest() {
  let found = { times: 0 };
  experts.shares.forEach((shares, row) => {
    const share = Math.max(...shares);
    const [times, expert] = [share * shares.length, shares.indexOf(share)];
    if (times > found.times) found = { times, share, expert, layer: experts.layers[row] };
  });
  return found;
}

function tellExperts({ times, share, expert, layer }, top) {
  const sizes = [...new Set(experts.tokens.map((tokens) => tokens.length))];
  const unused = experts.tokens.flat().filter((n) => !n).length;
  const sized = sizes.length === 1 ? `${whole(sizes[0])} in each of ` : "";
  put($("experts-told"), `${sized}${several(experts.layers.length, "layer")}`);
  put($("experts-top"), overEven(top));
  put($("experts-unused"), whole(unused));
  const most = `expert ${expert} of layer ${layer} has most, ${percent(share)}, ${overEven(times)}`;
  const words = `Tokens by expert: ${most}; ${whole(unused)} without tokens`;
  $("experts").setAttribute("aria-label", times ? words : "Tokens by expert: none yet");
}

function drawExperts() {
  const { layers, shares } = experts;
  const canvas = $("experts");
  if (!layers.length || !canvas.clientWidth) return;
  const [ink, soft] = [colour("expert"), softInk()];
  const drawn = [experts.step, canvas.clientWidth, devicePixelRatio, ink].join();
  if (drawn === experts.drawn) return; // thousands of cells
  const across = Math.max(...shares.map((row) => row.length));
  const height = Math.max(5, Math.min(20, Math.floor(300 / layers.length)));
  const { pen, width: all } = prepare(canvas, height * layers.length);
  const width = Math.min(40, (all - LAYER_AXIS) / across);
  Object.assign(experts, { width, height, drawn });
  const gap = Math.min(width, height) > 8 ? 2 : width > 3 ? 1 : 0;
  const most = busiest();
  const top = Math.max(2, most.times); // the cells of an even load have half of the colour
  const apart = Math.ceil(13 / height); // rows from one layer's number to the next
  pen.textBaseline = "middle";
  shares.forEach((row, i) => {
    const y = i * height;
    pen.globalAlpha = 1;
    pen.fillStyle = soft;
    if (i % apart === 0) pen.fillText(layers[i], 0, y + (height - gap) / 2);
    row.forEach((share, expert) => {
      const x = LAYER_AXIS + expert * width;
      pen.fillStyle = share ? ink : soft;
      pen.globalAlpha = share ? 0.1 + (0.9 * share * row.length) / top : 1;
      if (share) pen.fillRect(x, y, width - gap, height - gap);
      else pen.fillRect(x, y + (height - gap) / 2 - 0.5, width - gap, 1);
    });
  });
  pen.globalAlpha = 1;
  tellExperts(most, top);
}

tip($("experts"), $("experts-tip"), (x, y) => {
  const row = Math.floor(y / experts.height);
  const expert = Math.floor((x - LAYER_AXIS) / experts.width);
  const share = experts.shares[row]?.[expert];
  if (share === undefined) return "";
  const tokens = several(experts.tokens[row][expert], "token");
  const times = overEven(share * experts.shares[row].length);
  return `layer ${experts.layers[row]}, expert ${expert}: ${tokens}\n${percent(share)}, ${times}`;
});
