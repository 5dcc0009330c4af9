"""Pipeline from files to one result, over many ranks."""
