"""Facts about each framework: mechanisms, variants and failures."""
