"use strict";
// Reads out the values nearest to the pointer, and marks that step in every chart at once.
(() => {
  const charts = [...document.querySelectorAll("figure[data-readout]")].map((figure) => ({
    figure,
    svg: figure.querySelector(":scope > svg"),
    cursor: figure.querySelector(".cursor"),
    ...JSON.parse(figure.dataset.readout),
  }));
  const readout = document.getElementById("readout");

  const pixelOf = (chart, step) =>
    chart.left + ((step - chart.low) / (chart.high - chart.low)) * (chart.right - chart.left);

  const stepAt = (chart, clientX) => {
    const box = chart.svg.getBoundingClientRect();
    const pixel = ((clientX - box.left) / box.width) * chart.width;
    const share = (pixel - chart.left) / (chart.right - chart.left);
    return Math.round(chart.low + Math.min(1, Math.max(0, share)) * (chart.high - chart.low));
  };

  const nearest = (xs, step) => {
    let low = 0;
    let high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < step) low = middle + 1;
      else high = middle;
    }
    return low > 0 && step - xs[low - 1] <= xs[low] - step ? low - 1 : low;
  };

  const row = (series, step) => {
    const line = document.createElement("span");
    const label = document.createElement("i");
    const value = document.createElement("i");
    const index = nearest(series.x, step);
    label.textContent = series.label;
    value.textContent = Number(series.y[index].toPrecision(4)).toLocaleString("en-US", {
      maximumSignificantDigits: 4,
    });
    line.className = series.ink;
    line.append(label, value);
    return line;
  };

  const place = (event) => {
    const { width, height } = readout.getBoundingClientRect();
    const right = event.clientX + 16;
    const x = right + width > window.innerWidth ? event.clientX - 16 - width : right;
    const y = Math.min(event.clientY + 16, window.innerHeight - height - 8);
    readout.style.transform = `translate(${Math.max(8, x)}px, ${Math.max(8, y)}px)`;
  };

  const show = (chart, event) => {
    const step = stepAt(chart, event.clientX);
    const title = document.createElement("b");
    title.textContent = `step ${step.toLocaleString("en-US")}`;
    const rows = chart.series.filter((series) => series.x.length).map((series) => row(series, step));
    readout.replaceChildren(title, ...rows);
    readout.hidden = false;
    place(event);
    for (const other of charts) {
      other.cursor.setAttribute("transform", `translate(${pixelOf(other, step)} 0)`);
      other.cursor.setAttribute("visibility", "visible");
    }
  };

  const hide = () => {
    readout.hidden = true;
    for (const chart of charts) chart.cursor.setAttribute("visibility", "hidden");
  };

  for (const chart of charts) {
    chart.svg.addEventListener("pointermove", (event) => show(chart, event));
    chart.svg.addEventListener("pointerleave", hide);
  }
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
  document.documentElement.dataset.charts = String(charts.length);
})();
