// Draws one board with Perses: `window.BOARD` is the dashboard, `window.SOURCE` says where its
// Prometheus is and which span of time to show.
import { ThemeProvider } from "@mui/material";
import { ChartsProvider, SnackbarProvider, generateChartsTheme, getTheme } from "@perses-dev/components";
import { Dashboard, DashboardProvider, DatasourceStoreProvider, VariableProvider } from "@perses-dev/dashboards";
import { PluginRegistry, TimeRangeProvider, dynamicImportPluginLoader } from "@perses-dev/plugin-system";
import * as prometheus from "@perses-dev/prometheus-plugin";
import * as stat from "@perses-dev/stat-chart-plugin";
import * as timeseries from "@perses-dev/timeseries-chart-plugin";
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { createRoot } from "react-dom/client";
import { MemoryRouter } from "react-router-dom";
import { BucketsChart } from "./buckets.jsx";
import { NamesChart } from "./names.jsx";

const ours = {
  kind: "PluginModule",
  metadata: { name: "vcpo", version: "0" },
  spec: {
    plugins: [
      { kind: "Panel", spec: { name: "BucketsChart", display: { name: "Buckets" } } },
      { kind: "Panel", spec: { name: "NamesChart", display: { name: "Names" } } },
    ],
  },
};
const modules = [prometheus, stat, timeseries];
const pluginLoader = dynamicImportPluginLoader([
  { resource: ours, importPlugin: async () => ({ BucketsChart, NamesChart }) },
  ...modules.map((each) => ({ resource: each.getPluginModule(), importPlugin: async () => each })),
]);
const source = {
  kind: "GlobalDatasource",
  metadata: { name: "prometheus" },
  spec: {
    default: true,
    plugin: {
      kind: "PrometheusDatasource",
      spec: { directUrl: window.SOURCE.url, scrapeInterval: window.SOURCE.step },
    },
  },
};
const datasourceApi = {
  getDatasource: async () => undefined,
  getGlobalDatasource: async () => source,
  listDatasources: async () => [],
  listGlobalDatasources: async () => [source],
  buildProxyUrl: () => window.SOURCE.url,
};
const theme = getTheme("light", { shape: { borderRadius: 4 } });
const queryClient = new QueryClient({
  defaultOptions: { queries: { refetchOnWindowFocus: false, retry: 1 } },
});
const timeRange = { start: new Date(window.SOURCE.start * 1000), end: new Date(window.SOURCE.end * 1000) };
const isOrdinary = { isEditMode: false, dashboardResource: window.BOARD };

createRoot(document.getElementById("board")).render(
  <MemoryRouter>
    <ThemeProvider theme={theme}>
      <ChartsProvider chartsTheme={generateChartsTheme(theme, {})}>
        <SnackbarProvider>
          <PluginRegistry
            pluginLoader={pluginLoader}
            defaultPluginKinds={{ Panel: "TimeSeriesChart", TimeSeriesQuery: "PrometheusTimeSeriesQuery" }}
          >
            <QueryClientProvider client={queryClient}>
              <TimeRangeProvider timeRange={timeRange} refreshInterval="0s">
                <VariableProvider>
                  <DatasourceStoreProvider dashboardResource={window.BOARD} datasourceApi={datasourceApi}>
                    <DashboardProvider initialState={isOrdinary}>
                      <Dashboard />
                    </DashboardProvider>
                  </DatasourceStoreProvider>
                </VariableProvider>
              </TimeRangeProvider>
            </QueryClientProvider>
          </PluginRegistry>
        </SnackbarProvider>
      </ChartsProvider>
    </ThemeProvider>
  </MemoryRouter>,
);
