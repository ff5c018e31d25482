"use strict";
/* Every other script uses these: elements, numbers as text, storage.
   The scripts share one global scope, in the order of page.html. */

const $ = (id) => document.getElementById(id);
const h = (tag, properties, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const put = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

const whole = (n) => Math.round(n).toLocaleString("en-US");
const several = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;
const times = (n) => (n === 1 ? "once" : `${whole(n)} times`);
function seconds(s) {
  if (s == null) return "–";
  if (s === 0) return "0";
  if (s < 1e-4) return `${Math.round(s * 1e6)}\u00a0µs`;
  if (s < 0.01) return `${(s * 1e3).toFixed(1)}\u00a0ms`;
  if (s < 1) return `${Math.round(s * 1e3)}\u00a0ms`;
  return s < 100 ? `${s.toFixed(2)}\u00a0s` : `${whole(s)}\u00a0s`;
}

const still = matchMedia("(prefers-reduced-motion: reduce)");
const narrow = matchMedia("(max-width: 920px)");

/* A browser may forbid storage: localStorage then gives way to sessionStorage, and that to
   memory. `recall` returns "" for a name that is not there. */
function usable(name) {
  try {
    window[name].getItem("");
    return window[name];
  } catch {
    return null;
  }
}
const memory = {
  entries: new Map(),
  get length() {
    return this.entries.size;
  },
  key(i) {
    return [...this.entries.keys()][i];
  },
  getItem(name) {
    return this.entries.get(name) ?? null;
  },
  setItem(name, text) {
    this.entries.set(name, text);
  },
  removeItem(name) {
    this.entries.delete(name);
  },
};
const tabStore = usable("sessionStorage") || memory;
const browserStore = usable("localStorage") || tabStore;
const recall = (store, name) => store.getItem(name) ?? "";
function remember(store, name, text) {
  try {
    if (text) store.setItem(name, text);
    else store.removeItem(name);
    return true;
  } catch {
    return false; // the quota is used up
  }
}
