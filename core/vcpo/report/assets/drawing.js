// Draws a chart into its SVG element, one unit to a pixel, from the page's data and the view.

const SVG = document.querySelector("figure > svg").namespaceURI;
const MARGIN = { left: 46, right: 12, top: 10, bottom: 26 };
const LARGE = { height: 232, intervals: 6, fallback: 560 };
const SMALL = { height: 138, intervals: 4, fallback: 280 };
const HEAT_LEVELS = 8;
const MOST_LARGE_DOTS = 60;

const svgNode = (name, attributes = {}, ...children) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

const sizeOf = (figure) => (figure.closest(".small") ? SMALL : LARGE);

const hasData = (chart) =>
  chart.curves.some((curve) => curve.low.some((value) => value !== null)) ||
  Boolean(chart.heatmap?.cells.some((row) => row.some((value) => value !== null)));

const shownCurves = (chart, view) => chart.curves.filter((curve) => !view.hidden.has(keyOf(chart, curve)));

// The values of a curve in its rows within the range; both ends of buckets.
const valuesWithin = (curve, table, view) => {
  const [first, pastLast] = rowsWithin(table[view.x], ...view.range);
  const columns = curve.high ? [curve.low, curve.high] : [curve.low];
  return columns.flatMap((column) => column.slice(first, pastLast)).filter((value) => value !== null);
};

const verticalRange = (chart, view, data) => {
  const values = shownCurves(chart, view).flatMap((curve) => valuesWithin(curve, data.tables[curve.table], view));
  if (!values.length) return chart.log ? [0.1, 1] : [chart.low ?? 0, chart.high ?? 1];
  const least = values.reduce((a, b) => Math.min(a, b));
  const most = values.reduce((a, b) => Math.max(a, b));
  if (chart.log) return least < most ? [least / 1.2, most * 1.2] : [least / 2, most * 2];
  const [low, high] = [chart.low ?? least, chart.high ?? most];
  const margin = high > low ? 0.05 * (high - low) : 0.5 * Math.abs(low) || 0.5;
  return [chart.low ?? low - margin, chart.high ?? high + margin];
};

// A bucket is a stroke from its lowest to its highest value, so a curve of buckets is an envelope.
const curvePath = (curve, xs, rows, axes) => {
  let path = "";
  let isOpen = false;
  let isUp = true;
  for (let row = rows[0]; row < rows[1]; row++) {
    if (curve.low[row] === null) {
      isOpen = false;
      continue;
    }
    const low = axes.y.pixel(curve.low[row]);
    const high = curve.high ? axes.y.pixel(curve.high[row]) : low;
    path += `${isOpen ? "L" : "M"}${axes.x.pixel(xs[row])} ${isUp ? low : high}`;
    if (low !== high) path += `V${isUp ? high : low}`;
    else if (!isOpen) path += "h0";
    if (low !== high) isUp = !isUp;
    isOpen = true;
  }
  return path;
};

const curveNodes = (chart, view, data, axes) =>
  shownCurves(chart, view).flatMap((curve) => {
    const xs = data.tables[curve.table][view.x];
    const [first, pastLast] = rowsWithin(xs, ...view.range);
    const rows = [Math.max(0, first - 1), Math.min(xs.length, pastLast + 1)];
    const line = svgNode("path", { class: `${curve.style} ${curve.ink}`, d: curvePath(curve, xs, rows, axes) });
    if (curve.style !== "dots") return [line];
    const r = pastLast - first <= MOST_LARGE_DOTS ? 3.2 : 2;
    const dots = [];
    for (let row = first; row < pastLast; row++)
      if (curve.low[row] !== null)
        dots.push(svgNode("circle", { class: curve.ink, r, cx: axes.x.pixel(xs[row]), cy: axes.y.pixel(curve.low[row]) }));
    return [line, ...dots];
  });

// One path for each level of color: thousands of cells are few elements.
const heatNodes = (chart, view, data, axes) => {
  const { table, categories, cells } = chart.heatmap;
  const xs = data.tables[table][view.x];
  const paths = Array.from({ length: HEAT_LEVELS }, () => "");
  const height = (axes.y.start - axes.y.end) / categories.length;
  const [first, pastLast] = rowsWithin(xs, ...view.range);
  for (let row = Math.max(0, first - 1); row < pastLast; row++) {
    const left = axes.x.pixel(xs[row]);
    const right = row + 1 < xs.length ? axes.x.pixel(xs[row + 1]) : left + (row ? left - axes.x.pixel(xs[row - 1]) : 20);
    const width = Math.max(0.6, right - left + 0.3);
    cells.forEach((column, index) => {
      if (column[row] === null) return;
      const level = Math.min(HEAT_LEVELS - 1, Math.floor(column[row] * HEAT_LEVELS));
      const top = axes.y.start - (index + 1) * height + 0.5;
      paths[level] += `M${left} ${top.toFixed(1)}h${width.toFixed(1)}v${(height - 1).toFixed(1)}h${(-width).toFixed(1)}z`;
    });
  }
  return paths.flatMap((d, level) => (d ? [svgNode("path", { class: `heat heat-${level}`, d })] : []));
};

const bandNodes = (chart, axes) =>
  chart.bands.map((band) => {
    const top = axes.y.pixel(Math.min(band.high, axes.y.high));
    const bottom = axes.y.pixel(band.low);
    const size = { x: axes.x.start, y: top, width: axes.x.end - axes.x.start, height: Math.max(0, bottom - top) };
    return svgNode("rect", { class: `band ${band.level}`, ...size });
  });

const textNode = (name, x, y, words) => {
  const made = svgNode("text", { class: name, x, y });
  made.textContent = words;
  return made;
};

const verticalTicks = (chart, axes, intervals) => {
  if (chart.heatmap) {
    const height = (axes.y.start - axes.y.end) / chart.heatmap.categories.length;
    return chart.heatmap.categories.map((label, index) => [axes.y.start - (index + 0.5) * height, label]);
  }
  const { low, high } = axes.y;
  const ticks = chart.log ? logTicks(low, high, intervals) : linearTicks(low, high, intervals, chart.whole);
  return ticks.map((value) => [axes.y.pixel(value), numberLabel(value)]);
};

const gridNodes = (chart, view, axes, intervals) => {
  const { start: left, end: right } = axes.x;
  const floor = axes.y.start;
  const levels = verticalTicks(chart, axes, intervals).flatMap(([y, label]) => [
    ...(chart.heatmap ? [] : [svgNode("path", { class: "grid", d: `M${left} ${y}H${right}` })]),
    textNode("y-tick", left - 7, y + 3.5, label),
  ]);
  const about = Math.max(2, Math.floor((right - left) / 70));
  const ticks = view.x === "time" ? timeTicks(...view.range, about) : linearTicks(...view.range, about, true);
  const label = view.x === "time" ? timeLabel : countLabel;
  const places = ticks.map((value) => textNode("x-tick", axes.x.pixel(value), floor + 17, label(value)));
  return [...levels, svgNode("path", { class: "axis", d: `M${left} ${floor}H${right}` }), ...places];
};

const markNodes = (view, data, axes) => {
  const byPixel = new Map();
  for (const { label, step, ...rest } of data.marks)
    step.forEach((number, index) => {
      const x = view.x === "time" ? rest.time[index] : number;
      if (x < view.range[0] || x > view.range[1]) return;
      byPixel.set(Math.round(axes.x.pixel(x)), `step ${countLabel(number)} ${label}`);
    });
  return [...byPixel].map(([x, label]) => {
    const title = svgNode("title");
    title.textContent = label;
    return svgNode("path", { class: "mark", d: `M${x} ${axes.y.start}l-4 7h8z` }, title);
  });
};

// Draws a chart and keeps its axes, its cursor and its selection for the pointer.
const drawChart = (drawn, view, data) => {
  const { chart, figure, svg } = drawn;
  const size = sizeOf(figure);
  const width = svg.clientWidth || size.fallback;
  const floor = size.height - MARGIN.bottom;
  const axes = {
    x: axisOf(...view.range, MARGIN.left, width - MARGIN.right),
    y: axisOf(...(chart.heatmap ? [0, 1] : verticalRange(chart, view, data)), floor, MARGIN.top, chart.log),
  };
  const clip = `clip-${chart.name}`;
  const area = { x: MARGIN.left, y: 0, width: width - MARGIN.left - MARGIN.right, height: floor + 1 };
  const cursor = svgNode("path", { class: "cursor", d: `M0 ${MARGIN.top}V${floor}`, visibility: "hidden" });
  const selection = svgNode("rect", { class: "selection", y: MARGIN.top, height: floor - MARGIN.top, visibility: "hidden" });
  const curves = chart.heatmap ? heatNodes(chart, view, data, axes) : curveNodes(chart, view, data, axes);
  svg.setAttribute("viewBox", `0 0 ${width} ${size.height}`);
  svg.replaceChildren(
    svgNode("clipPath", { id: clip }, svgNode("rect", area)),
    ...bandNodes(chart, axes),
    ...gridNodes(chart, view, axes, size.intervals),
    svgNode("g", { "clip-path": `url(#${clip})` }, ...curves),
    ...markNodes(view, data, axes),
    selection,
    cursor,
  );
  Object.assign(drawn, { axes, cursor, selection, width });
};
