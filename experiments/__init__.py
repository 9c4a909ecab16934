"""The laboratory: command line, runs, sweeps, results, reports."""
