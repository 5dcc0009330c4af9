"""Several processes: launchers, ranks, and what the script starts by itself."""
