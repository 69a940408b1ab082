"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const FIRST_ROWS = 200;

  function make(tag, properties = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });

  /** A table of {titles, numbers: how many columns at the end hold numbers, rows: [text, ...], keys}. */
  function showTable(name, table) {
    const place = byId(`${name}-table`);
    if (!place) return;
    const firstNumber = table.titles.length - table.numbers;
    let sorted = -1;
    let isDown = false;
    let most = FIRST_ROWS;
    const body = make("tbody");
    const more = make("button", { type: "button", className: "more", textContent: "Show all" });
    const heads = table.titles.map((title, index) => {
      const button = make("button", { type: "button", textContent: title });
      button.addEventListener("click", () => {
        isDown = sorted === index ? !isDown : index >= firstNumber;
        sorted = index;
        draw();
      });
      return make("th", { scope: "col", className: index >= firstNumber ? "number" : "" }, button);
    });

    function compare(a, b) {
      const [x, y] = sorted < firstNumber
        ? [table.rows[a][sorted], table.rows[b][sorted]]
        : [table.keys[a][sorted - firstNumber], table.keys[b][sorted - firstNumber]];
      if (x === y) return a - b;
      if (x === null || y === null) return x === null ? 1 : -1;
      return (x < y ? -1 : 1) * (isDown ? -1 : 1);
    }

    function draw() {
      const words = byId(`${name}-search`).value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = table.rows.map((_, index) => index);
      shown = shown.filter((index) => {
        const text = table.rows[index].join(" ").toLowerCase();
        return words.every((word) => text.includes(word));
      });
      if (sorted >= 0) shown.sort(compare);
      heads.forEach((head, index) => {
        if (index === sorted) head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      body.replaceChildren(...shown.slice(0, most).map((index) =>
        make("tr", {}, ...table.rows[index].map((text, column) =>
          make("td", { textContent: text, className: column >= firstNumber ? "number" : "" })))));
      byId(`${name}-count`).textContent = `${shown.length} of ${table.rows.length}`;
      more.hidden = shown.length <= most;
    }

    more.addEventListener("click", () => { most = Infinity; draw(); });
    byId(`${name}-search`).addEventListener("input", draw);
    place.append(make("table", { className: "table" }, make("thead", {}, make("tr", {}, ...heads)), body), more);
    draw();
  }

  for (const [name, table] of Object.entries(data?.tables ?? {})) showTable(name, table);
})();
