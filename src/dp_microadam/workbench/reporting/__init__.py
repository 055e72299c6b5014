"""Reports about runs and sweeps: HTML pages, figures, tables and model cards."""
