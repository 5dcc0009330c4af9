"""What is known of each framework: one file each, and the choice between them."""
