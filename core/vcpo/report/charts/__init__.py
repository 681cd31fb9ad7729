"""The charts of a report: what they show, and their data for the page."""
