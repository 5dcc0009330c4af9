"""A result made readable: page, terminal text, Markdown and figures. Reads the result only."""
