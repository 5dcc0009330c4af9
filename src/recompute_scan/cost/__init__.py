"""Cost of recomputes in time, arithmetic and memory, and savings of a change."""
