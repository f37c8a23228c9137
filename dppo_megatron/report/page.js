"use strict";
// The values under the pointer, for every chart with lines.
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const series = JSON.parse(svg.dataset.hover);
  if (!series.length) continue;
  const view = svg.viewBox.baseVal, figure = svg.parentElement;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  line.setAttribute("class", "cross");
  line.setAttribute("y1", 10);
  line.setAttribute("y2", view.height - 28);
  const tip = document.createElement("div");
  tip.className = "tip";
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * view.width;
    const near = series.map((one) => one.p.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)));
    const best = near.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    line.setAttribute("x1", best[0]);
    line.setAttribute("x2", best[0]);
    svg.append(line);
    tip.replaceChildren(document.createTextNode(best[2]));
    series.forEach((one, i) => {
      if (Math.abs(near[i][0] - best[0]) > 8) return;
      const row = document.createElement("div"), key = document.createElement("i");
      key.className = "key c" + one.c;
      row.append(key, document.createTextNode((series.length > 1 ? one.n + "  " : "") + near[i][3]));
      tip.append(row);
    });
    figure.append(tip);
    const x = ((best[0] / view.width) * box.width) + svg.offsetLeft + 14;
    tip.style.left = Math.min(x, figure.clientWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = figure.querySelector("svg").getBoundingClientRect().top - figure.getBoundingClientRect().top + 12 + "px";
  });
  svg.addEventListener("pointerleave", () => { line.remove(); tip.remove(); });
}

// The sample browser: groups of completions, filtered; texts enter the page as text only.
const store = document.getElementById("sample-data");
if (store) {
  const steps = JSON.parse(store.textContent), list = document.getElementById("sample-list");
  const chosen = document.getElementById("sample-step"), search = document.getElementById("sample-search");
  const boxes = [...document.querySelectorAll("input[data-filter]")];
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    made.className = className;
    made.textContent = text;
    return made;
  };
  const show = () => {
    const on = new Set(boxes.filter((box) => box.checked).map((box) => box.dataset.filter));
    const words = search.value.toLowerCase();
    const wanted = (one, group) =>
      on.has(one.right ? "right" : "wrong") && on.has(one.kept ? "kept" : "dropped") &&
      (!words || (group.prompt + one.text).toLowerCase().includes(words));
    let count = 0;
    const cards = [];
    for (const group of steps[chosen.value].groups) {
      const rows = group.samples.filter((one) => wanted(one, group));
      count += rows.length;
      if (!rows.length) continue;
      const card = element("div", "card group", "");
      card.append(element("div", "text", group.prompt));
      card.append(element("div", "sub", "answer " + group.answer + " \u00b7 prompt kept with probability " + group.p));
      const table = document.createElement("table");
      const head = table.insertRow(), numeric = new Set(["reward", "advantage", "weight", "keep prob."]);
      for (const name of ["", "reward", "advantage", "weight", "keep prob.", "ended", "completion"])
        head.append(Object.assign(document.createElement("th"), { textContent: name, className: numeric.has(name) ? "n" : "" }));
      for (const one of rows) {
        const row = table.insertRow();
        row.className = "sample";
        const tags = row.insertCell();
        tags.append(element("span", "tag " + (one.right ? "right" : "wrong"), one.right ? "right" : "wrong"), " ");
        tags.append(element("span", "tag " + (one.kept ? "" : "dropped"), one.kept ? "kept" : "dropped"));
        for (const name of ["reward", "advantage", "weight", "p", "end"]) {
          const cell = row.insertCell();
          cell.className = name === "end" ? "" : "n";
          cell.textContent = one[name];
        }
        row.insertCell().append(element("div", "text", one.text));
      }
      const scroll = element("div", "scroll", "");
      scroll.append(table);
      card.append(scroll);
      cards.push(card);
    }
    list.replaceChildren(...cards);
    document.getElementById("sample-count").textContent = count + " completions shown";
  };
  steps.forEach((step, i) => chosen.append(new Option("step " + step.step, i)));
  chosen.value = steps.length - 1;
  for (const control of [chosen, search, ...boxes]) control.addEventListener("input", show);
  show();
}

// Rows of the configuration that differ from the defaults, or all.
const all = document.getElementById("config-all");
if (all) {
  const apply = () => {
    for (const row of document.querySelectorAll("tr.default")) row.hidden = !all.checked;
  };
  all.addEventListener("input", apply);
  apply();
}
