// A heatmap of a classic histogram over time. Perses' own heatmap draws native histograms only.
// Each series holds one cumulative bucket, with its upper bound in the label `le`.
import { useTheme } from "@mui/material";
import { EChart } from "@perses-dev/components";
import { HeatmapChart as Heatmap } from "echarts/charts";
import { GridComponent, VisualMapComponent } from "echarts/components";
import { use } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

use([Heatmap, GridComponent, VisualMapComponent, CanvasRenderer]);

const COLORS = ["#fdf3e7", "#fdd0a2", "#fd8d3c", "#d94801", "#7f2704"];
const bound = ({ labels }) => Number(labels.le.replace("+Inf", "Infinity"));
const clock = (time) => new Date(time).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

// Rows of the heatmap, from the lowest bucket up, without those that never counted anything.
function rowsOf(queryResults) {
  const cumulative = queryResults
    .flatMap(({ data }) => data.series)
    .sort((one, other) => bound(one) - bound(other));
  const rows = cumulative.map((each, i) => {
    const below = new Map(i ? cumulative[i - 1].values : []);
    const counts = each.values.map(([time, count]) => [time, count - (below.get(time) ?? 0)]);
    const isAbove = bound(each) === Infinity;
    return { name: isAbove ? `> ${bound(cumulative[i - 1])}` : `${bound(each)}`, counts };
  });
  const counted = rows.map(({ counts }) => counts.some(([, count]) => count > 1e-6));
  return rows.slice(counted.indexOf(true), counted.lastIndexOf(true) + 1);
}

function Buckets({ queryResults, contentDimensions }) {
  const text = useTheme().palette.text.secondary;
  const rows = rowsOf(queryResults);
  if (!rows.length || !contentDimensions) return null;
  const times = [...new Set(rows.flatMap(({ counts }) => counts.map(([time]) => time)))].sort();
  const cells = rows.flatMap(({ counts }, row) =>
    counts.filter(([, count]) => count > 1e-6).map(([time, count]) => [times.indexOf(time), row, count]),
  );
  const axis = { type: "category", axisTick: { show: false }, axisLabel: { color: text, fontSize: 12 } };
  const option = {
    animation: false,
    grid: { left: 44, right: 12, top: 12, bottom: 26 },
    xAxis: {
      ...axis,
      data: times.map(clock),
      axisLabel: { ...axis.axisLabel, interval: Math.ceil(times.length / 5) },
    },
    yAxis: { ...axis, data: rows.map(({ name }) => name) },
    visualMap: {
      show: false,
      min: 0,
      max: Math.max(...cells.map(([, , count]) => count)),
      inRange: { color: COLORS },
    },
    series: [{ type: "heatmap", data: cells }],
  };
  return <EChart option={option} sx={contentDimensions} />;
}

export const BucketsChart = {
  PanelComponent: Buckets,
  supportedQueryTypes: ["TimeSeriesQuery"],
  createInitialOptions: () => ({}),
};
