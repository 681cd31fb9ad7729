// Saves what is shown as CSV or JSON: the rows within the range, the curves that are not hidden.

const columnsOf = (chart) => {
  if (chart.heatmap)
    return chart.heatmap.categories.map((label, index) => ({
      table: chart.heatmap.table,
      name: `${chart.title}: ${label}`,
      values: chart.heatmap.cells[index],
    }));
  return shownCurves(chart, page.view).flatMap((curve) => {
    const name = `${chart.title}: ${curve.label}`;
    if (!curve.high) return [{ table: curve.table, name, values: curve.low }];
    return [
      { table: curve.table, name: `${name} (least)`, values: curve.low },
      { table: curve.table, name: `${name} (most)`, values: curve.high },
    ];
  });
};

const shownRows = () => {
  const shown = page.drawn.filter((drawn) => !drawn.figure.hidden);
  const columns = shown.flatMap((drawn) => columnsOf(drawn.chart));
  const rows = Object.entries(page.data.tables).flatMap(([table, { step, time }]) => {
    const own = columns.filter((column) => column.table === table);
    const [first, pastLast] = rowsWithin(page.view.x === "time" ? time : step, ...page.view.range);
    if (!own.length) return [];
    return step.slice(first, pastLast).map((number, index) => ({
      step: number,
      time_s: time[first + index],
      ...Object.fromEntries(own.map(({ name, values }) => [name, values[first + index]])),
    }));
  });
  return { names: [...new Set(["step", "time_s", ...columns.map((column) => column.name)])], rows };
};

const csvCell = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};

const csvOf = ({ names, rows }) =>
  [names, ...rows.map((row) => names.map((name) => row[name]))].map((cells) => `${cells.map(csvCell).join(",")}\n`).join("");

const save = (text, type, ending) => {
  const link = document.createElement("a");
  const name = document.querySelector("h1").textContent.replaceAll(/[^\w.-]+/g, "-");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${name}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
};

const downloads = {
  "download-csv": () => save(csvOf(shownRows()), "text/csv", "csv"),
  "download-json": () => save(JSON.stringify(shownRows().rows), "application/json", "json"),
};
