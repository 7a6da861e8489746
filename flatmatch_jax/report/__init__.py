"""A run, or several side by side, as one page to look at: report.html."""
