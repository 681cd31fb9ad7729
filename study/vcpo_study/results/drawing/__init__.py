"""Plots as SVG text: scales, one plot, and a sheet of several with a legend."""
