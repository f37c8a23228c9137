"""What a run looks like afterwards: the HTML report, and the comparison of runs."""
