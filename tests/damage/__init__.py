"""Broken files: read as far as they can be, with every repair and loss counted."""
