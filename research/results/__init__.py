"""Results of the cells: measures, choices, tables, figures. Pure but for `write_study_report`."""
