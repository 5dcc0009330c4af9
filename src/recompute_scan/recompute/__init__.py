"""Core: which forward ops ran again in the backward pass, and how often."""
