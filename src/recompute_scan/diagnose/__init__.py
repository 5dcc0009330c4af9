"""Diagnosis of failures: logs and exceptions in, known causes and fixes out.

Pure functions over text and plain data. The known failures are data; :mod:`.outcome` lists them.
"""
