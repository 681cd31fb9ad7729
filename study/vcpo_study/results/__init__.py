"""What came of the cells: measures, choices, tables and figures. Pure but for `write_report`."""
