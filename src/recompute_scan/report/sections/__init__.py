"""The sections of the report: one module each, with its template beside it."""
