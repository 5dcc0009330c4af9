"""What recomputes cost in time, arithmetic and memory, and what a change would give."""
