// Reads out the values at the pointer or at the keyboard's cursor, and zooms by dragging and by keys.

const SHORTEST_DRAG = 6;
const readout = document.getElementById("readout");

const atPointer = (drawn, event) => {
  const box = drawn.svg.getBoundingClientRect();
  const pixel = ((event.clientX - box.left) / box.width) * drawn.width;
  const { start, end } = drawn.axes.x;
  return drawn.axes.x.invert(Math.min(end, Math.max(start, pixel)));
};

const valueWords = (low, high) => {
  if (low === null) return "-";
  return high === undefined || high === low ? numberLabel(low) : `${numberLabel(low)} to ${numberLabel(high)}`;
};

const readoutRow = (ink, label, words) => {
  const line = document.createElement("span");
  const name = document.createElement("i");
  const value = document.createElement("i");
  name.textContent = label;
  value.textContent = words;
  line.className = ink;
  line.append(name, value);
  return line;
};

const rowAt = (table, x) => {
  const xs = table[page.view.x];
  if (!xs.length) return null;
  const row = nearest(xs, x);
  const gap = xs.length > 1 ? (xs[xs.length - 1] - xs[0]) / (xs.length - 1) : 1;
  return Math.abs(xs[row] - x) <= Math.max(1, 2 * gap) ? row : null;
};

const curveRows = (chart, x) =>
  shownCurves(chart, page.view).flatMap((curve) => {
    const row = rowAt(page.data.tables[curve.table], x);
    if (row === null || (curve.style === "dots" && curve.low[row] === null)) return [];
    return [readoutRow(curve.ink, curve.label, valueWords(curve.low[row], curve.high?.[row]))];
  });

const heatRows = (chart, x) => {
  const row = rowAt(page.data.tables[chart.heatmap.table], x);
  if (row === null) return [];
  return chart.heatmap.categories
    .map((label, index) => [label, chart.heatmap.cells[index][row]])
    .filter(([, value]) => value !== null)
    .map(([label, value]) => readoutRow("", `lag ${label}`, valueWords(value)))
    .reverse();
};

// The step, or the steps of the bucket, and the time of the row nearest to x.
const titleAt = (chart, x) => {
  const names = chart.heatmap ? [chart.heatmap.table] : shownCurves(chart, page.view).map((curve) => curve.table);
  const table = page.data.tables[names.find((name) => rowAt(page.data.tables[name], x) !== null) ?? names[0]];
  const row = table && rowAt(table, x);
  if (row === null || row === undefined) return page.view.x === "time" ? timeLabel(x) : `step ${countLabel(Math.round(x))}`;
  const last = row + 1 < table.step.length ? table.step[row + 1] - 1 : table.step[row];
  const steps = table.rows > 1 && last > table.step[row] ? `steps ${countLabel(table.step[row])} to ${countLabel(last)}` : `step ${countLabel(table.step[row])}`;
  return `${steps} · ${timeLabel(table.time[row])}`;
};

const place = (left, top) => {
  const { width, height } = readout.getBoundingClientRect();
  const x = left + 16 + width > window.innerWidth ? left - 16 - width : left + 16;
  const y = Math.min(top + 16, window.innerHeight - height - 8);
  readout.style.transform = `translate(${Math.max(8, x)}px, ${Math.max(8, y)}px)`;
};

const showAt = (drawn, x, clientX, clientY) => {
  const title = document.createElement("b");
  title.textContent = titleAt(drawn.chart, x);
  readout.replaceChildren(title, ...(drawn.chart.heatmap ? heatRows : curveRows)(drawn.chart, x));
  readout.hidden = false;
  place(clientX, clientY);
  page.cursor = x;
  for (const other of page.drawn) {
    if (other.figure.hidden) continue;
    other.cursor.setAttribute("transform", `translate(${other.axes.x.pixel(x)} 0)`);
    other.cursor.setAttribute("visibility", "visible");
  }
};

const hideReadout = () => {
  readout.hidden = true;
  page.cursor = null;
  for (const drawn of page.drawn) drawn.cursor?.setAttribute("visibility", "hidden");
};

const drag = { drawn: null, from: 0, clientX: 0 };

const showSelection = (drawn, x) => {
  const [left, right] = [drag.from, x].map(drawn.axes.x.pixel).sort((a, b) => a - b);
  drawn.selection.setAttribute("x", left);
  drawn.selection.setAttribute("width", right - left);
  drawn.selection.setAttribute("visibility", "visible");
};

const endDrag = (event) => {
  const { drawn, from, clientX } = drag;
  drag.drawn = null;
  if (!drawn) return;
  drawn.selection.setAttribute("visibility", "hidden");
  if (Math.abs(event.clientX - clientX) < SHORTEST_DRAG) return;
  zoomTo([from, atPointer(drawn, event)].sort((a, b) => a - b));
  hideReadout();
};

const onMove = (drawn, event) => {
  const x = atPointer(drawn, event);
  if (drag.drawn === drawn) showSelection(drawn, x);
  showAt(drawn, x, event.clientX, event.clientY);
};

// Moves the keyboard's cursor by rows of the chart's first table.
const moveCursor = (drawn, rows) => {
  const name = drawn.chart.heatmap?.table ?? drawn.chart.curves[0]?.table;
  const xs = page.data.tables[name]?.[page.view.x] ?? [];
  const [first, pastLast] = rowsWithin(xs, ...page.view.range);
  if (pastLast <= first) return;
  const from = page.cursor === null ? (rows > 0 ? first - 1 : pastLast) : nearest(xs, page.cursor);
  const x = xs[Math.min(pastLast - 1, Math.max(first, from + rows))];
  const box = drawn.svg.getBoundingClientRect();
  showAt(drawn, x, box.left + (drawn.axes.x.pixel(x) / drawn.width) * box.width, box.top);
};

const zoomBy = (factor) => {
  const [low, high] = page.view.range;
  const middle = page.cursor ?? (low + high) / 2;
  zoomTo([middle - (middle - low) * factor, middle + (high - middle) * factor]);
};

const KEYS = {
  ArrowLeft: (drawn) => moveCursor(drawn, -1),
  ArrowRight: (drawn) => moveCursor(drawn, 1),
  PageUp: (drawn) => moveCursor(drawn, -10),
  PageDown: (drawn) => moveCursor(drawn, 10),
  Home: (drawn) => moveCursor(drawn, -Infinity),
  End: (drawn) => moveCursor(drawn, Infinity),
  "+": () => zoomBy(0.5),
  "=": () => zoomBy(0.5),
  "-": () => zoomBy(2),
  0: () => zoomTo(null),
  Escape: () => {
    zoomTo(null);
    hideReadout();
  },
};

const listenTo = (drawn) => {
  const { svg } = drawn;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    Object.assign(drag, { drawn, from: atPointer(drawn, event), clientX: event.clientX });
    if (event.isTrusted) svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => onMove(drawn, event));
  svg.addEventListener("pointerup", endDrag);
  svg.addEventListener("pointercancel", () => {
    drag.drawn?.selection.setAttribute("visibility", "hidden");
    drag.drawn = null;
  });
  svg.addEventListener("pointerleave", hideReadout);
  svg.addEventListener("blur", hideReadout);
  svg.addEventListener("dblclick", () => zoomTo(null));
  svg.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act(drawn);
  });
};
