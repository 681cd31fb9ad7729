// Reads out the values at the pointer or at the keyboard's cursor, and zooms by keys and by touch.

const SHORTEST_DRAG = 6;
const readout = document.getElementById("readout");

const atPointer = ({ plot }, event) => {
  const { left, width } = plot.over.getBoundingClientRect();
  return plot.posToVal(Math.min(width, Math.max(0, event.clientX - left)), "x");
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

const tableAt = (chart, x) => {
  const names = chart.heatmap ? [chart.heatmap.table] : shownCurves(chart, page.view).map((curve) => curve.table);
  return page.data.tables[names.find((name) => rowAt(page.data.tables[name], x) !== null) ?? names[0]];
};

// First and last step of a row: a bucket has several.
const stepsOf = (table, row) => {
  const isLast = row + 1 >= table.step.length;
  return [table.step[row], isLast || table.rows === 1 ? table.step[row] : table.step[row + 1] - 1];
};

// The step, or the steps of the bucket, and the time of the row nearest to x; then its marks.
const titlesAt = (chart, x) => {
  const table = tableAt(chart, x);
  const row = table && rowAt(table, x);
  if (row === null || row === undefined)
    return [page.view.x === "time" ? timeLabel(x) : `step ${countLabel(Math.round(x))}`];
  const [first, last] = stepsOf(table, row);
  const steps = last > first ? `steps ${countLabel(first)} to ${countLabel(last)}` : `step ${countLabel(first)}`;
  const marks = page.data.marks.filter(({ step }) => step.some((each) => each >= first && each <= last));
  return [`${steps} · ${timeLabel(table.time[row])}`, ...marks.map(({ label }) => label)];
};

const place = (left, top) => {
  const { width, height } = readout.getBoundingClientRect();
  const x = left + 16 + width > window.innerWidth ? left - 16 - width : left + 16;
  const y = Math.min(top + 16, window.innerHeight - height - 8);
  readout.style.transform = `translate(${Math.max(8, x)}px, ${Math.max(8, y)}px)`;
};

const moveCursors = (left) => {
  for (const { figure, plot } of page.drawn) if (!figure.hidden) plot.setCursor({ left: left(plot), top: 0 }, false);
};

const showAt = (drawn, x, clientX, clientY) => {
  const titles = titlesAt(drawn.chart, x).map((words) => {
    const title = document.createElement("b");
    title.textContent = words;
    return title;
  });
  readout.replaceChildren(...titles, ...(drawn.chart.heatmap ? heatRows : curveRows)(drawn.chart, x));
  readout.hidden = false;
  place(clientX, clientY);
  page.cursor = x;
  moveCursors((plot) => plot.valToPos(x, "x"));
};

const hideReadout = () => {
  readout.hidden = true;
  page.cursor = null;
  moveCursors(() => -10);
};

// Moves the keyboard's cursor by rows of the chart's first table.
const moveCursor = (drawn, rows) => {
  const name = drawn.chart.heatmap?.table ?? drawn.chart.curves[0]?.table;
  const xs = page.data.tables[name]?.[page.view.x] ?? [];
  const [first, pastLast] = rowsWithin(xs, ...page.view.range);
  if (pastLast <= first) return;
  const from = page.cursor === null ? (rows > 0 ? first - 1 : pastLast) : nearest(xs, page.cursor);
  const x = xs[Math.min(pastLast - 1, Math.max(first, from + rows))];
  const box = drawn.plot.over.getBoundingClientRect();
  showAt(drawn, x, box.left + drawn.plot.valToPos(x, "x"), box.top);
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

// uPlot hears the mouse only.
const listenToTouch = (drawn) => {
  let start = null;
  drawn.area.addEventListener("pointerdown", (event) => {
    start = event.pointerType === "touch" ? { x: atPointer(drawn, event), at: event.clientX } : null;
  });
  drawn.area.addEventListener("pointerup", (event) => {
    if (start && Math.abs(event.clientX - start.at) >= SHORTEST_DRAG)
      zoomTo([start.x, atPointer(drawn, event)].sort((a, b) => a - b));
    start = null;
  });
};

const listenTo = (drawn) => {
  const { area } = drawn;
  area.addEventListener("pointermove", (event) =>
    showAt(drawn, atPointer(drawn, event), event.clientX, event.clientY),
  );
  area.addEventListener("pointerleave", hideReadout);
  area.addEventListener("blur", hideReadout);
  area.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act(drawn);
  });
  listenToTouch(drawn);
};
