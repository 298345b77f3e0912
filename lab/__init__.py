"""The laboratory: sweeps, reports and what was measured with them, on stampede's public API."""
