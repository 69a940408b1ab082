"use strict";

// --- elements and numbers ---------------------------------------------------------------------

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function scaled(number, unit) {
  if (number >= 1e21) return `${number.toExponential(1)} ${unit}`.trim();
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  let power = 0;
  while (number >= 999.5 && power < 6) { number /= 1000; power += 1; }
  return `${power && number < 9.95 ? number.toFixed(1) : Math.round(number)} ${prefixes[power]}${unit}`;
}

const grouping = new Intl.NumberFormat("en");
const count = (number) => (number < 1e6 ? grouping.format(number) : scaled(number, "").trim());
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});

// --- tables -----------------------------------------------------------------------------------

const FIRST_ROWS = 100;

/**
 * A table that is sorted by its headers, filtered by a search box, and drawn as far as one looks.
 * Columns: {title, value(row), show(value, row), isNumber, kind(row): its CSS class}.
 */
function showTable(name, noun, columns, rows) {
  const [place, search, status] = ["table", "search", "count"].map((part) => byId(`${name}-${part}`));
  let sorted = -1;
  let isDown = false;
  let shown = rows;
  const body = make("tbody");
  const heads = columns.map((column, index) => {
    const button = make("button", { type: "button", textContent: column.title });
    button.addEventListener("click", () => {
      isDown = sorted === index ? !isDown : Boolean(column.isNumber);
      sorted = index;
      draw();
    });
    return make("th", { scope: "col", className: column.isNumber ? "number" : "" }, button);
  });
  const more = make("button", { type: "button", className: "more" });
  more.addEventListener("click", () => append(body.rows.length + 500));
  let found = null; // what each row is searched in, made by the first search

  function isFound(words, index) {
    const searched = columns.filter((column) => !column.isNumber);
    found ??= rows.map((row) => searched.map((column) => column.value(row)).join(" ").toLowerCase());
    return words.every((word) => found[index].includes(word));
  }

  function append(end) {
    const part = document.createDocumentFragment();
    for (const row of shown.slice(body.rows.length, end)) {
      part.append(make("tr", {}, ...columns.map((column) => {
        const value = column.value(row);
        const kind = [column.isNumber ? "number" : "", column.kind?.(row) ?? ""].join(" ");
        const cell = make("td", { className: kind.trim() });
        cell.append(column.show ? column.show(value, row) : value);
        return cell;
      })));
    }
    body.append(part);
    more.hidden = body.rows.length >= shown.length;
    more.textContent = `Show more: ${count(shown.length - body.rows.length)} are left`;
  }

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = words.length ? rows.filter((_, index) => isFound(words, index)) : [...rows];
    if (sorted >= 0) {
      const { value, isNumber } = columns[sorted];
      const sign = isDown ? -1 : 1;
      const texts = new Intl.Collator("en", { numeric: true });
      const number = (row) => value(row) ?? -Number.MAX_VALUE;
      shown.sort((a, b) => sign * (isNumber ? number(a) - number(b) : texts.compare(value(a), value(b))));
    }
    heads.forEach((head, index) => {
      if (index === sorted) head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    status.textContent = words.length ? `${count(shown.length)} of ${plural(rows.length, noun)}` : plural(rows.length, noun);
    body.replaceChildren();
    append(FIRST_ROWS);
  }

  search.oninput = draw;
  place.replaceChildren(
    make("table", { className: "table" }, make("thead", {}, make("tr", {}, ...heads)), body), more);
  draw();
}

for (const [name, table] of Object.entries(data.tables)) {
  const first = table.titles.length - table.numbers;
  const columns = table.titles.map((title, index) => ({
    title,
    isNumber: index >= first,
    value: (row) => (index < first ? table.rows[row][index] : table.keys[row][index - first]),
    show: (_, row) => table.rows[row][index],
    kind: (row) => table.kinds[row][index],
  }));
  showTable(name, "row", columns, [...table.rows.keys()]);
}
