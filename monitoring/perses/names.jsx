// A panel of Perses that shows the names of the series that exist now, as the boards' kind `names` does: Perses'
// own panel of numbers would show a 1 for each.
import { Stack, Typography } from "@mui/material";

function Names({ queryResults }) {
  const series = queryResults.flatMap(({ data }) => data.series);
  const newest = Math.max(...series.map(({ values }) => values.at(-1)[0]));
  return (
    <Stack justifyContent="center" height="100%" paddingX={2} spacing={1}>
      {series
        .filter(({ values }) => values.at(-1)[0] === newest)
        .map(({ formattedName }) => {
          const [condition, reason] = formattedName.split(": ");
          return (
            <Typography key={formattedName} variant="h3">
              <span style={{ color: "#6b7280", fontWeight: 400 }}>{condition}</span> {reason}
            </Typography>
          );
        })}
    </Stack>
  );
}

export const NamesChart = {
  PanelComponent: Names,
  supportedQueryTypes: ["TimeSeriesQuery"],
  createInitialOptions: () => ({}),
};
