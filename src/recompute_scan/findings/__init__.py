"""Rules that find problems, one module per family, and their registry."""
