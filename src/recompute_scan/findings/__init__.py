"""What is wrong or could be better: one rule a module, and the list of them."""
