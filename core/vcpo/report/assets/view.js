// What is shown: the horizontal axis, the range of it, and the curves that the reader has hidden.

const page = {
  data: null,
  drawn: [],
  view: { x: "step", range: [0, 1], isZoomed: false, hidden: new Set() },
  cursor: null,
  isPrinted: false,
};

const keyOf = (chart, curve) => `${chart.name}/${curve.label}`;

const fullRange = () => {
  const ends = Object.values(page.data.tables).flatMap((table) => {
    const xs = table[page.view.x];
    return xs.length ? [xs[0], xs[xs.length - 1]] : [];
  });
  if (!ends.length) return [0, 1];
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  return low < high ? [low, high] : [low - 0.5, high + 0.5];
};

const rangeWords = () => {
  const [low, high] = page.view.range;
  if (page.view.x === "time") return `${timeLabel(low)} to ${timeLabel(high)}`;
  return `steps ${countLabel(Math.ceil(low))} to ${countLabel(Math.floor(high))}`;
};

const redraw = () => {
  const { view, data } = page;
  if (!view.isZoomed) view.range = fullRange();
  for (const drawn of page.drawn) if (!drawn.figure.hidden) drawChart(drawn, view, data);
  document.getElementById("range").textContent = view.isZoomed ? rangeWords() : "";
  document.getElementById("show-all").hidden = !view.isZoomed;
  for (const button of document.querySelectorAll("[data-x]"))
    button.setAttribute("aria-pressed", String(button.dataset.x === view.x));
};

// Shows a range of the horizontal axis, cut to what there is; null shows all.
const zoomTo = (range) => {
  const [least, most] = fullRange();
  const narrowest = page.view.x === "step" ? 1 : (most - least) / 1000;
  const cut = range && [Math.max(least, range[0]), Math.min(most, range[1])];
  const isInside = cut && cut[1] - cut[0] >= narrowest;
  if (range && !isInside) return;
  page.view.isZoomed = Boolean(isInside) && (cut[0] > least || cut[1] < most);
  if (isInside) page.view.range = cut;
  redraw();
};

const sample = (names) => {
  const made = document.createElement("i");
  made.className = names;
  return made;
};

const toggle = (key) => {
  const { hidden } = page.view;
  if (hidden.has(key)) hidden.delete(key);
  else hidden.add(key);
  for (const button of document.querySelectorAll(".entry"))
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.key)));
  redraw();
};

const entryOf = (chart, curve) => {
  const button = document.createElement("button");
  const key = keyOf(chart, curve);
  button.type = "button";
  button.className = "entry";
  button.dataset.key = key;
  button.title = `Hide or show ${curve.label}`;
  button.setAttribute("aria-pressed", String(!page.view.hidden.has(key)));
  button.append(sample(`sample ${curve.style} ${curve.ink}`), curve.label);
  button.addEventListener("click", () => toggle(key));
  return button;
};

const heatScale = () => {
  const scale = document.createElement("span");
  scale.className = "scale";
  scale.append("0", sample("heat"), "1");
  return scale;
};

const fillLegend = ({ chart, figure }) => {
  const labels = chart.curves.map(({ label }) => label);
  const curves = chart.curves.filter(
    ({ label, low }, at) => labels.indexOf(label) === at && low.some((value) => value !== null),
  );
  const entries = chart.heatmap ? [heatScale()] : curves.map((curve) => entryOf(chart, curve));
  figure.querySelector(".legend").replaceChildren(...entries);
};

// Takes the data of all charts; a chart without any is left out, and what is around no chart.
const load = (data) => {
  page.data = data;
  for (const chart of data.charts) {
    const figure = document.getElementById(`chart-${chart.name}`);
    const known = page.drawn.find((drawn) => drawn.figure === figure);
    const drawn = known ?? { figure, area: figure.querySelector(".plot") };
    drawn.plot?.destroy();
    Object.assign(drawn, { chart, plot: null });
    if (!known) page.drawn.push(drawn);
    figure.hidden = !hasData(chart);
    fillLegend(drawn);
  }
  for (const section of document.querySelectorAll("section:has(figure)"))
    section.hidden = !section.querySelector("figure:not([hidden])");
  document.querySelector(".toolbar").hidden = !page.drawn.some(({ figure }) => !figure.hidden);
  for (const grid of document.querySelectorAll(".charts.small")) {
    const shown = grid.querySelectorAll("figure:not([hidden])").length;
    grid.classList.toggle("by-three", shown % 4 === 1 || shown % 3 === 0);
  }
  redraw();
};
