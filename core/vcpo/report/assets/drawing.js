// Draws a chart with uPlot, from the page's data and the view. uPlot has curves, axes, cursor and
// selection; cells, bands and marks are painted here.

const LARGE = { height: 232, tickSpace: 36 };
const SMALL = { height: 138, tickSpace: 28 };
const PRINTED_WIDTH = 330;
const HEAT_LEVELS = 8;
const FONT = "11px system-ui, sans-serif";
const COUNTS = Array.from({ length: 16 }, (_, digits) => [1, 2, 5].map((first) => first * 10 ** digits)).flat();
const TIMES_S = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, MINUTE_S, 120, 300, 600, 900, 1800,
  HOUR_S, 7200, 10800, 21600, 43200, ...[1, 2, 7, 14, 28, 56, 112].map((days) => days * DAY_S),
];
const STYLES = {
  line: { width: 2.2 },
  raw: { width: 1, alpha: 0.35 },
  thin: { width: 1.2, alpha: 0.8 },
  dots: { width: 1.2, alpha: 0.8 },
  reference: { width: 1.4, dash: [5, 4] },
};

// A color of the style sheet, as it is now: light, dark or printed.
const colorOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const hasData = (chart) =>
  chart.curves.some((curve) => curve.low.some((value) => value !== null)) ||
  Boolean(chart.heatmap?.cells.some((row) => row.some((value) => value !== null)));

const shownCurves = (chart, view) => chart.curves.filter((curve) => !view.hidden.has(keyOf(chart, curve)));

const tableNames = (chart) => [...new Set(chart.curves.map((curve) => curve.table))];

// Curves in the order of their columns: those of one table follow each other.
const curvesOf = (chart) => tableNames(chart).flatMap((name) => chart.curves.filter((curve) => curve.table === name));

// A bucket is a stroke from its lowest to its highest value, so a curve of buckets is an envelope.
const strokesOf = (curve, isOfBuckets) =>
  isOfBuckets
    ? curve.low.flatMap((low, row) => (row % 2 ? [curve.high?.[row] ?? low, low] : [low, curve.high?.[row] ?? low]))
    : curve.low;

// uPlot's columns: x, and one for each curve. A row of another table is undefined, which is no gap.
const plottedColumns = (chart, view, data) => {
  if (chart.heatmap) {
    const xs = data.tables[chart.heatmap.table][view.x];
    return [xs, xs.map(() => null)];
  }
  const parts = tableNames(chart).map((name) => {
    const isOfBuckets = data.tables[name].rows > 1;
    const xs = data.tables[name][view.x];
    const columns = chart.curves.filter((curve) => curve.table === name).map((curve) => strokesOf(curve, isOfBuckets));
    return { xs: isOfBuckets ? xs.flatMap((x) => [x, x]) : xs, columns };
  });
  const rows = parts.flatMap(({ xs }, part) => xs.map((x, row) => ({ x, part, row }))).sort((a, b) => a.x - b.x);
  const spread = ({ columns }, part) =>
    columns.map((column) => rows.map((each) => (each.part === part ? column[each.row] : undefined)));
  return [rows.map(({ x }) => x), ...parts.flatMap(spread)];
};

// A little more than is shown: of rows at the same x uPlot takes the first one for the last.
const horizontalRange = () => {
  const [low, high] = page.view.range;
  return [low - 1e-6 * (high - low), high + 1e-6 * (high - low)];
};

const verticalRange = (chart, least, most) => {
  if (chart.heatmap) return [0, chart.heatmap.categories.length];
  if (least === null || least === undefined) return chart.log ? [0.1, 1] : [chart.low ?? 0, chart.high ?? 1];
  if (chart.log) return uPlot.rangeLog(least, most, 10, false);
  const [low, high] = [chart.low ?? least, chart.high ?? most];
  const margin = high > low ? 0.05 * (high - low) : 0.5 * Math.abs(low) || 0.5;
  return [chart.low ?? low - margin, chart.high ?? high + margin];
};

// Ticks of a logarithmic axis: powers of ten, or both ends where there are few. uPlot's own do not end above 1e32.
const logTicks = (low, high) => {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const stride = Math.max(1, Math.ceil((last - first + 1) / 5));
  const powers = Array.from({ length: Math.ceil((last - first + 1) / stride) }, (_, index) => first + index * stride);
  return powers.length > 1 ? powers.map((power) => 10 ** power) : [low, high];
};

// Rows whose neighbors are gaps: a line has no length there.
const lonelyRows = (plot, series) =>
  plot.data[series].flatMap((value, row, all) =>
    value != null && all[row - 1] == null && all[row + 1] == null ? [row] : [],
  );

const seriesOf = (curve) => {
  const stroke = () => colorOf(curve.ink);
  const isDots = curve.style === "dots";
  const points = { show: true, stroke, fill: stroke, width: 0, size: isDots ? 6 : 3, space: 0 };
  return { ...STYLES[curve.style], stroke, points: isDots ? points : { ...points, filter: lonelyRows } };
};

const axesOf = (chart, size) => {
  const [stroke, edge] = [() => colorOf("soft"), () => colorOf("edge")];
  const words = (label) => (_, values) => values.map((value) => (value === null ? "" : label(value)));
  const isOfTime = () => page.view.x === "time";
  const common = { stroke, font: FONT, ticks: { show: false } };
  const categories = chart.heatmap?.categories;
  return [
    {
      ...common,
      size: 26,
      gap: 9,
      space: 70,
      grid: { show: false },
      border: { show: true, stroke: edge, width: 1 },
      incrs: () => (isOfTime() ? TIMES_S : COUNTS),
      values: (plot, values) => words(isOfTime() ? timeLabel : countLabel)(plot, values),
    },
    {
      ...common,
      size: 46,
      gap: 7,
      space: size.tickSpace,
      grid: { show: !categories, stroke: () => colorOf("grid"), width: 1 },
      values: words(numberLabel),
      ...(chart.whole && { incrs: COUNTS }),
      ...(chart.log && { splits: (_, __, low, high) => logTicks(low, high), filter: (_, values) => values }),
      ...(categories && { splits: () => categories.map((_, index) => index + 0.5), values: () => categories }),
    },
  ];
};

// Paints within the plot area. paint: takes the context.
const paintIn = ({ ctx, bbox }, paint) => {
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  paint(ctx);
  ctx.restore();
};

const paintBands = (plot, bands) =>
  paintIn(plot, (ctx) => {
    for (const { low, high, level } of bands) {
      const [top, bottom] = [high, low].map((value) => plot.valToPos(value, "y", true));
      ctx.globalAlpha = level === "critical" ? 0.13 : 0.1;
      ctx.fillStyle = colorOf(level === "critical" ? "bad" : "notice");
      ctx.fillRect(plot.bbox.left, top, plot.bbox.width, bottom - top);
    }
  });

const paintCells = (plot, { cells }) =>
  paintIn(plot, (ctx) => {
    const [xs] = plot.data;
    const colors = Array.from({ length: HEAT_LEVELS }, (_, level) => colorOf(`h${level}`));
    const height = plot.bbox.height / cells.length;
    const lefts = xs.map((x) => Math.round(plot.valToPos(x, "x", true)));
    const [first, pastLast] = rowsWithin(xs, ...page.view.range);
    for (let row = Math.max(0, first - 1); row < pastLast; row++) {
      const width = row + 1 < lefts.length ? lefts[row + 1] - lefts[row] : row ? lefts[row] - lefts[row - 1] : 20;
      cells.forEach((column, index) => {
        if (column[row] === null) return;
        ctx.fillStyle = colors[Math.min(HEAT_LEVELS - 1, Math.floor(column[row] * HEAT_LEVELS))];
        const top = plot.bbox.top + (cells.length - 1 - index) * height;
        ctx.fillRect(lefts[row], top + 1, Math.max(1, width), height - 1);
      });
    }
  });

// A triangle below the axis at each mark; the readout has its words.
const paintMarks = (plot, marks) => {
  const { ctx, bbox } = plot;
  const [floor, unit] = [bbox.top + bbox.height, uPlot.pxRatio];
  ctx.fillStyle = colorOf("bad");
  for (const x of marks.flatMap((mark) => mark[page.view.x])) {
    if (x < page.view.range[0] || x > page.view.range[1]) continue;
    const at = plot.valToPos(x, "x", true);
    ctx.beginPath();
    ctx.moveTo(at, floor);
    ctx.lineTo(at - 4 * unit, floor + 7 * unit);
    ctx.lineTo(at + 4 * unit, floor + 7 * unit);
    ctx.fill();
  }
};

const takeSelection = (plot) => {
  const { left, width } = plot.select;
  if (width === 0) return;
  const range = [left, left + width].map((at) => plot.posToVal(at, "x"));
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  zoomTo(range);
};

const sizeOf = (figure) => (figure.closest(".small") ? SMALL : LARGE);

const widthOf = (area) => (page.isPrinted ? PRINTED_WIDTH : area.clientWidth);

const plotOf = ({ chart, figure, area }, view, data) => {
  const size = sizeOf(figure);
  const series = chart.heatmap ? [{ stroke: "transparent", points: { show: false } }] : curvesOf(chart).map(seriesOf);
  const options = {
    width: widthOf(area),
    height: size.height,
    padding: [10, 12, 0, 0],
    legend: { show: false },
    cursor: {
      y: false,
      points: { show: false },
      drag: { x: true, y: false, setScale: false, dist: 6 },
      bind: { dblclick: () => () => zoomTo(null) },
    },
    scales: {
      x: { time: false, range: horizontalRange },
      y: { distr: chart.log ? 3 : 1, range: (_, least, most) => verticalRange(chart, least, most) },
    },
    axes: axesOf(chart, size),
    series: [{}, ...series],
    hooks: {
      drawClear: [(plot) => paintBands(plot, chart.bands)],
      draw: [
        (plot) => chart.heatmap && paintCells(plot, chart.heatmap),
        (plot) => paintMarks(plot, page.data.marks),
      ],
      setSelect: [takeSelection],
    },
  };
  return new uPlot(options, plottedColumns(chart, view, data), area);
};

const drawChart = (drawn, view, data) => {
  const { chart, figure, area } = drawn;
  if (!drawn.plot) drawn.plot = plotOf(drawn, view, data);
  const { plot } = drawn;
  plot.batch(() => {
    if (plot.width !== widthOf(area)) plot.setSize({ width: widthOf(area), height: sizeOf(figure).height });
    curvesOf(chart).forEach((curve, index) =>
      plot.setSeries(index + 1, { show: !view.hidden.has(keyOf(chart, curve)) }),
    );
    plot.setData(plottedColumns(chart, view, data));
  });
};
