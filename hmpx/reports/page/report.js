(() => {
  const texts = data.texts;
  const links = new Map(Object.entries(data.links));

  // --- elements and numbers -----------------------------------------------------------------

  function drawn(tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  const size = (number) => scaled(number, "B");

  function duration(seconds) {
    if (seconds === null) return "-";
    const [value, unit] =
      seconds >= 1 ? [seconds, "s"] : seconds >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "us"];
    return `${value < 10 ? value.toFixed(1) : value >= 1e6 ? value.toExponential(0) : Math.round(value)} ${unit}`;
  }

  function share(part, whole) {
    if (!(whole > 0)) return "-";
    const percent = 100 * (part / whole);
    if (percent > 0 && percent < 1) return "<1 %";
    if (percent > 99 && percent < 100) return ">99 %";
    return `${Math.round(percent)} %`;
  }

  /** Sums, in the order of a module's: calls, low, FLOPs, low, bytes, low, casts, bytes cast, seconds. */
  const [CALLS, FLOPS, BYTES, CASTS, CAST_BYTES, SECONDS] = [0, 2, 4, 6, 7, 8];

  /** The share in low precision, from 0 to 1: of what is asked for, else of FLOPs, bytes or calls. */
  function low(sums, measure = FLOPS) {
    const of = [measure, FLOPS, BYTES, CALLS].find((each) => each < CASTS && sums[each] > 0);
    return of === undefined ? 0 : sums[of + 1] / sums[of];
  }

  const precision = (part) => (part <= 0 ? "wide" : part >= 1 ? "low" : "mixed");

  /** A location by the last two parts of its path, linked to its source. */
  function link(location) {
    const target = links.get(location);
    const short = { title: location, textContent: location.split(/[\\/]/).slice(-2).join("/") };
    return target ? make("a", { href: `#${target}`, ...short }) : make("span", short);
  }

  // --- calls --------------------------------------------------------------------------------

  const [OP, PHASE, FROM, IN, TO, MODULE, LOCATION, DEVICE, REASON, IS_LOW, NUMBERS] = Array(11).keys();
  const names = {
    [OP]: "op", [PHASE]: "phase", [FROM]: "from", [IN]: "in", [TO]: "to", [MODULE]: "module",
    [LOCATION]: "line", [DEVICE]: "device", [REASON]: "reason",
  };
  const groupings = {
    "op and types": [OP, PHASE, FROM, IN, TO],
    "line and op": [LOCATION, OP, IN],
    "module": [MODULE],
    "reason": [REASON, OP, IN],
    "nothing: all that differ": [OP, PHASE, FROM, IN, TO, MODULE, LOCATION, DEVICE, REASON],
  };

  /** Returns rows {key, sums}: calls that have the same texts in some fields, added up. */
  function grouped(fields) {
    const groups = new Map();
    for (const row of data.rows) {
      let id = "";
      for (const field of fields) id += `${row[field]},`;
      let group = groups.get(id);
      if (!group) {
        group = { key: fields.map((field) => texts[row[field]]), sums: [0, 0, 0, 0, 0, 0, 0, 0, null] };
        groups.set(id, group);
      }
      const { sums } = group;
      const calls = row[NUMBERS], flops = row[NUMBERS + 3], bytes = row[NUMBERS + 4];
      sums[CALLS] += calls;
      sums[FLOPS] += flops;
      sums[BYTES] += bytes;
      if (row[IS_LOW]) {
        sums[CALLS + 1] += calls;
        sums[FLOPS + 1] += flops;
        sums[BYTES + 1] += bytes;
      }
      sums[CASTS] += row[NUMBERS + 1];
      sums[CAST_BYTES] += row[NUMBERS + 2];
      if (row[NUMBERS + 5] !== null) sums[SECONDS] += row[NUMBERS + 5];
    }
    return [...groups.values()].sort(
      (a, b) => b.sums[FLOPS] - a.sums[FLOPS] || b.sums[BYTES] - a.sums[BYTES]);
  }

  const all = data.modules[0].slice(3);

  function showCalls() {
    const fields = groupings[byId("grouping").value];
    const rows = grouped(fields);
    const columns = fields.map((field, index) => ({
      title: names[field],
      value: (row) => row.key[index],
      show: field === LOCATION ? link : field === MODULE ? (name) => name || "(outermost)" : undefined,
      kind: (row) => (field === IN ? `short ${precision(low(row.sums))}` : [OP, FROM, TO].includes(field) ? "short" : ""),
    }));
    const number = (title, place, show) => {
      if (all[place]) columns.push({ title, value: (row) => row.sums[place], show, isNumber: true });
    };
    number("calls", CALLS, count);
    if (!fields.includes(IN)) {
      columns.push({
        title: "low", value: (row) => low(row.sums), isNumber: true, show: (part) => share(part, 1),
        kind: (row) => precision(low(row.sums)),
      });
    }
    number("casts", CASTS, count);
    number("bytes cast", CAST_BYTES, size);
    number("FLOPs", FLOPS, (value) => share(value, all[FLOPS]));
    number("bytes", BYTES, (value) => share(value, all[BYTES]));
    number("time", SECONDS, duration);
    showTable("ops", "row", columns, rows);
  }

  byId("grouping").append(...Object.keys(groupings).map((name) => new Option(name)));
  byId("grouping").addEventListener("change", showCalls);
  showCalls();

  // --- casts --------------------------------------------------------------------------------

  const text = (title, field, show) => ({ title, value: (row) => texts[row[field]], show });
  showTable("casts", "place", [
    { ...text("kind", 0), kind: () => "short" }, text("what", 1), text("module", 2), text("line", 3, link),
    { title: "times", value: (row) => row[6], show: count, isNumber: true },
    { title: "bytes", value: (row) => row[7], show: size, isNumber: true },
    text("fix", 4, (fix) => make("code", { textContent: fix })), { ...text("note", 5), kind: () => "long" },
  ], data.waste);

  // --- modules ------------------------------------------------------------------------------

  const modules = data.modules.map(([path, name, parent, ...sums]) => (
    { path: texts[path], name: texts[name] || "(outermost)", parent, sums, children: [], depth: 0 }));
  modules.forEach((node) => {
    if (node.parent < 0) return;
    node.depth = modules[node.parent].depth + 1;
    modules[node.parent].children.push(node);
  });
  const order = new Intl.Collator("en", { numeric: true });
  modules.forEach((node) => node.children.sort((a, b) => order.compare(a.name, b.name)));

  const measures = { FLOPs: FLOPS, bytes: BYTES, calls: CALLS, time: SECONDS, "bytes cast": CAST_BYTES };
  const measure = () => measures[byId("measure").value] ?? CALLS;
  byId("measure").append(
    ...Object.keys(measures).filter((name) => all[measures[name]] > 0).map((name) => new Option(name)));

  function described(node) {
    const { sums } = node;
    const parts = [`${node.path || node.name}: ${share(low(sums, measure()), 1)} in low precision`];
    if (all[FLOPS]) parts.push(`${share(sums[FLOPS], all[FLOPS])} of FLOPs`);
    if (all[BYTES]) parts.push(`${share(sums[BYTES], all[BYTES])} of bytes`);
    parts.push(plural(sums[CALLS], "call"));
    if (sums[CASTS]) parts.push(`${size(sums[CAST_BYTES])} cast`);
    if (sums[SECONDS] !== null) parts.push(duration(sums[SECONDS]));
    return parts.join(", ");
  }

  function label(node) {
    const bar = make("span", { className: "bar" }, make("span"));
    const by = measure();
    bar.firstChild.style.width = `${100 * low(node.sums, by)}%`;
    bar.setAttribute("aria-hidden", "true");
    const casts = node.sums[CASTS] ? `, ${size(node.sums[CAST_BYTES])} cast` : "";
    const part = by === CAST_BYTES || !(all[by] > 0) ? "" : `, ${share(node.sums[by], all[by])} of ${byId("measure").value}`;
    node.label = make("span", { className: "node", title: described(node) },
      make("span", { className: "name", textContent: node.name }), bar,
      make("span", { className: "note", textContent: `${share(low(node.sums, by), 1)} low${part}${casts}` }));
    return node.label;
  }

  /** Returns a branch, whose children are made when it is opened for the first time. */
  function branch(node) {
    if (!node.children.length) return make("li", { className: "leaf" }, label(node));
    const details = make("details", {}, make("summary", {}, label(node)));
    details.addEventListener("toggle", () => details.childElementCount > 1 || details.append(list(node.children)));
    return make("li", {}, details);
  }

  function list(nodes) {
    const part = make("ul", {}, ...nodes.slice(0, 200).map(branch));
    if (nodes.length > 200) {
      const more = make("button", { type: "button", textContent: `${count(nodes.length - 200)} more` });
      more.addEventListener("click", () => more.replaceWith(...nodes.slice(200).map(branch)));
      part.append(more);
    }
    return part;
  }

  byId("tree").append(list([modules[0]]));
  byId("tree").querySelectorAll("details").forEach((details) => { details.open = true; });

  // --- the icicle ---------------------------------------------------------------------------

  const [HEIGHT, DEEPEST, NARROWEST] = [22, 12, 1.5];
  let top = modules[0];
  let cells = []; // [node, x, width, depth] of each cell

  const mix = (part) => {
    const [from, to] = [[247, 205, 120], [130, 182, 240]];
    return `rgb(${from.map((each, i) => Math.round(each + part * (to[i] - each))).join()})`;
  };

  function drawIcicle(isFocused) {
    const by = measure();
    const total = byId("icicle").clientWidth || 800;
    const svg = drawn("svg", { role: "group", "aria-label": "Modules by share; the list below has the same" });
    const above = [];
    cells = [];
    for (let node = top; node.parent >= 0;) above.unshift(node = modules[node.parent]);
    above.forEach((node, depth) => cells.push([node, 0, total, depth]));
    const left = [[top, 0, total, above.length]];
    let deepest = 0;
    while (left.length) {
      const [node, x, width, depth] = left.pop();
      cells.push([node, x, width, depth]);
      deepest = Math.max(deepest, depth);
      if (depth >= above.length + DEEPEST) continue;
      let at = x;
      const below = node.children.map((child) => {
        const part = node.sums[by] > 0 ? width * (child.sums[by] / node.sums[by]) : 0;
        at += part;
        return [child, at - part, part, depth + 1];
      });
      left.push(...below.filter((cell) => cell[2] >= NARROWEST).reverse());
    }
    const height = (deepest + 1) * HEIGHT;
    svg.setAttribute("viewBox", `0 0 ${total} ${height}`);
    svg.setAttribute("height", height);
    cells.forEach(([node, x, width, depth], index) => {
      const cell = drawn("g", { role: "button", tabindex: index ? -1 : 0, "aria-label": described(node) });
      const title = drawn("title", {});
      title.textContent = described(node);
      cell.append(title, drawn("rect", {
        x, y: depth * HEIGHT, width, height: HEIGHT, fill: mix(low(node.sums, by)) }));
      const most = Math.floor((width - 8) / 7);
      if (most > 2) {
        const written = drawn("text", { x: x + 4, y: depth * HEIGHT + 15 });
        written.textContent = node.name.length > most ? `${node.name.slice(0, most - 1)}\u2026` : node.name;
        cell.append(written);
      }
      svg.append(cell);
    });
    byId("icicle").replaceChildren(svg);
    byId("about-module").textContent = described(top);
    byId("out").disabled = top.parent < 0;
    if (isFocused) svg.children[above.length].focus({ preventScroll: true });
  }

  // Listeners are the parent's: an svg that listens to focus is a stop of the tab key itself.
  function listen(type, act) {
    byId("icicle").addEventListener(type, (event) => {
      const cell = event.target.closest("g");
      if (cell) act(cells[[...cell.parentNode.children].indexOf(cell)][0], cell, event);
    });
  }

  const zoom = (node) => { top = node; drawIcicle(true); };
  const describe = (node) => { byId("about-module").textContent = described(node); };
  listen("click", zoom);
  listen("focusin", describe);
  listen("mouseover", describe);
  listen("keydown", (node, cell, event) => {
    const next = {
      ArrowRight: cell.nextSibling, ArrowDown: cell.nextSibling,
      ArrowLeft: cell.previousSibling, ArrowUp: cell.previousSibling,
    };
    if (event.key === "Enter" || event.key === " ") zoom(node);
    else if (event.key in next) next[event.key]?.focus();
    else return;
    event.preventDefault();
  });
  byId("measure").addEventListener("change", () => {
    modules.filter((node) => node.label).forEach((node) => node.label.replaceWith(label(node)));
    drawIcicle(false);
  });
  byId("out").addEventListener("click", () => { top = modules[Math.max(0, top.parent)]; drawIcicle(false); });
  window.addEventListener("resize", () => drawIcicle(false));
  setTimeout(() => drawIcicle(false)); // it measures the page: after that is shown

  // --- buttons ------------------------------------------------------------------------------

  document.querySelectorAll("button.copy").forEach((button) => {
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch { // not allowed here: via a selection
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  });
})();
