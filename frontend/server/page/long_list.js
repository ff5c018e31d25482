"use strict";
/* Makes a list that scrolls over any number of rows and holds elements only for those in sight.

   A row keeps its element by key(item). make(item) returns { element, ... }, a row's button.
   fill(row, item, index) brings it up to date. onSight(last) gets the index of the last row in
   sight. A row is as high as the CSS variable --row. Tab reaches one row; the arrow keys,
   Page Up, Page Down, Home and End move between rows. */

function longList(box, { key, make, fill, onSight }) {
  const shown = new Map();
  const inner = h("div", { className: "long" });
  box.append(inner);
  let items = [];
  let current = ""; // the key of the row that Tab reaches

  function draw() {
    const height = parseFloat(getComputedStyle(box).getPropertyValue("--row"));
    inner.style.height = `${items.length * height}px`;
    if (!box.clientHeight) return; // not in sight: this view is hidden
    const first = Math.max(0, Math.floor(box.scrollTop / height) - 3);
    const last = Math.min(items.length, Math.ceil((box.scrollTop + box.clientHeight) / height) + 3);
    const focused = inner.contains(document.activeElement) ? document.activeElement : null;
    const wanted = items.slice(first, last).map((item, i) => [key(item), item, first + i]);
    const at = items.findIndex((item) => key(item) === current);
    if (at < 0)
      current = wanted.length ? key(items[Math.ceil(box.scrollTop / height)] ?? wanted[0][1]) : "";
    else if (at < first) wanted.unshift([current, items[at], at]);
    else if (at >= last) wanted.push([current, items[at], at]);
    const kept = new Set(wanted.map(([id]) => id));
    for (const [id, row] of shown) {
      if (kept.has(id)) continue;
      row.element.remove();
      shown.delete(id);
    }
    wanted.forEach(([id, item, index], i) => {
      let row = shown.get(id);
      if (!row) shown.set(id, (row = make(item)));
      if (inner.children[i] !== row.element)
        inner.insertBefore(row.element, inner.children[i] || null);
      row.element.style.top = `${index * height}px`;
      row.element.tabIndex = id === current ? 0 : -1;
      row.element.onfocus = () => (current = id);
      fill(row, item, index);
    });
    if (focused?.isConnected && focused !== document.activeElement)
      focused.focus({ preventScroll: true }); // it has moved among its neighbours
    if (items.length) onSight?.(last - 1);
  }

  function goTo(index) {
    const height = parseFloat(getComputedStyle(box).getPropertyValue("--row"));
    index = Math.max(0, Math.min(items.length - 1, index));
    const top = index * height;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + height > box.scrollTop + box.clientHeight)
      box.scrollTop = top + height - box.clientHeight;
    current = key(items[index]);
    draw();
    shown.get(current).element.focus({ preventScroll: true });
  }
  box.addEventListener("keydown", (event) => {
    const at = items.findIndex((item) => key(item) === current);
    const page = Math.max(1, Math.floor(box.clientHeight / (inner.clientHeight / items.length)));
    const to = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: items.length - 1,
    }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    goTo(to);
  });
  box.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(box);
  return (newItems) => {
    items = newItems;
    draw();
  };
}
