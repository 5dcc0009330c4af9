"""Sections of the report, one module and template each."""
