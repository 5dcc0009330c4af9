"""What is known of each framework: one file each, and which of them a stack shows."""
