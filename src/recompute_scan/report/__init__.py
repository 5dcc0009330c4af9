"""Rendering of a result as page, terminal text, Markdown and figures."""
