"use strict";
/* Draws one traced step as a flame chart: its parts, the stages of the execution, and the kernels
   of each thread. A click on a bar shows what it was. frontend/trace/html.py puts this file into a
   page of its own, too. */

/* Makes an element of a StepTrace and Limits (ipc/trace.py). */
const flameChart = (() => {
  const COLORS = [
    "#8ecae6", "#ffb703", "#b5e48c", "#f4a261", "#cdb4db", "#90e0ef", "#e5989b",
    "#c9ada7", "#e9c46a", "#a3b18a", "#f7a1c4", "#9fb4ff", "#d4d700", "#80ced7",
    "#d5bdaf", "#b8b8ff", "#ffd6a5", "#99d98c",
  ];

  /* Returns the limit that memory bandwidth or arithmetic sets, whichever takes longer. */
  function limitOf(kernel, limits) {
    const bytes = kernel.weight_bytes + kernel.other_bytes;
    const memory = limits.bytes_per_s ? bytes / limits.bytes_per_s : 0;
    const isOfIntegers = /linear_(int|q\d|iq)|quantized|gguf/.test(`${kernel.op} ${kernel.implementation}`);
    const isOfFp32 = /gated_delta_rule|selective_scan/.test(kernel.op);
    const peak = isOfIntegers ? limits.int8_ops : isOfFp32 ? limits.fp32_flops : limits.flops;
    const arithmetic = peak ? kernel.flops / peak : 0;
    const least = Math.max(memory, arithmetic);
    if (!least || !kernel.seconds) return "unknown";
    const share = `${Math.round((100 * least) / kernel.seconds)} % of what `;
    return share + (memory >= arithmetic ? "memory bandwidth allows" : "arithmetic allows");
  }

  function describe(kernel, limits) {
    const bytes = kernel.weight_bytes + kernel.other_bytes;
    return {
      module: kernel.module || "(outside of the layers)",
      operation: `${kernel.op}, ${kernel.implementation}`,
      shape: `${kernel.shape} ${kernel.dtype}`,
      time: `${(1e6 * kernel.seconds).toFixed(1)} µs`,
      bytes: `${bytes} (weights: ${kernel.weight_bytes})`,
      rate: `${(bytes / kernel.seconds / 1e9).toFixed(1)} GB/s, ${(kernel.flops / kernel.seconds / 1e9).toFixed(1)} GFLOP/s`,
      limit: limitOf(kernel, limits),
      line: [kernel.place, kernel.implementation_place].filter(Boolean).join(", "),
    };
  }

  function rowsOf(step, limits) {
    const end = step.execute_begin_s + step.execute_s;
    const part = (name, begin, seconds) => ({
      name, begin, seconds, about: { part: name, time: `${(1e3 * seconds).toFixed(3)} ms` },
    });
    const rows = new Map([["step", [
      part("schedule", step.begin_s, step.schedule_s),
      part("execute", step.execute_begin_s, step.execute_s),
      part("process", end, step.process_s),
    ]]]);
    for (const rank of step.ranks) {
      rows.set("stages", rank.spans.map((span) => part(span.name, span.begin_s, span.seconds)));
      for (const kernel of rank.kernels) {
        const whole = [[0, kernel.begin_s, kernel.begin_s + kernel.seconds]];
        const about = describe(kernel, limits);
        for (const [thread, begin, until] of kernel.threads.length ? kernel.threads : whole) {
          const row = `thread ${thread}`;
          if (!rows.has(row)) rows.set(row, []);
          const name = `${kernel.module} ${kernel.op}`;
          rows.get(row).push({ name, kind: kernel.op, begin, seconds: until - begin, about });
        }
      }
    }
    return rows;
  }

  /* Returns what the colour of a bar says: its operation, or its part of the step. */
  const kindOf = (bar) => bar.kind || bar.name;

  /* Lists the colours, those with the most time first. Threads work at the same time, so the time
     of an operation is that of all threads together. */
  function legendOf(kinds) {
    const list = document.createElement("ul");
    list.className = "kinds";
    list.setAttribute("aria-label", "Colours of the bars");
    const found = [...kinds].sort((a, b) => b[1].seconds - a[1].seconds);
    for (const [kind, { color, seconds }] of found) {
      const item = document.createElement("li"), swatch = document.createElement("i");
      swatch.style.background = color;
      item.append(swatch, `${kind} ${(1e6 * seconds).toFixed(0)} µs`);
      list.append(item);
    }
    return list;
  }

  function show(list, about) {
    list.replaceChildren();
    for (const [term, value] of Object.entries(about)) {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = term;
      dd.textContent = value;
      list.append(dt, dd);
    }
  }

  function chartOf(step, limits) {
    const chart = document.createElement("section");
    chart.className = "flame";
    const heading = document.createElement("h3"), details = document.createElement("dl");
    const num_tokens = step.rows.reduce((sum, row) => sum + row.num_tokens, 0);
    const begin = step.begin_s, end = step.execute_begin_s + step.execute_s + step.process_s;
    const total = Math.max(end - begin, 1e-9);
    heading.textContent =
      `Step ${step.step}: ${num_tokens} tokens computed, ${step.num_tokens} sampled, ` +
      `${(1e3 * total).toFixed(3)} ms`;
    chart.append(heading);
    const kinds = new Map(); // what a colour says -> { color, seconds of all its bars }
    for (const [name, bars] of rowsOf(step, limits)) {
      const row = document.createElement("div"), title = document.createElement("span");
      row.className = "row";
      title.textContent = name;
      row.append(title);
      const lane = document.createElement("div");
      lane.className = "lane";
      row.append(lane);
      for (const bar of bars) {
        const button = document.createElement("button");
        button.type = "button";
        button.title = bar.name;
        button.setAttribute("aria-label", `${name}: ${bar.name}`);
        button.textContent = bar.name;
        button.style.left = `${(100 * (bar.begin - begin)) / total}%`;
        button.style.width = `${(100 * bar.seconds) / total}%`;
        const kind = kindOf(bar);
        const known = kinds.get(kind) || { color: COLORS[kinds.size % COLORS.length], seconds: 0 };
        known.seconds += bar.seconds;
        kinds.set(kind, known);
        button.style.background = known.color;
        button.addEventListener("click", () => show(details, bar.about));
        lane.append(button);
      }
      chart.append(row);
    }
    chart.append(legendOf(kinds), details);
    return chart;
  }

  return chartOf;
})();
