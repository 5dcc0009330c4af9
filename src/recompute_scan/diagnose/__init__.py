"""What a failure means: logs and exceptions in, known causes with their fixes out.

Pure functions over text and plain data. The known failures are data, in the modules that
:mod:`.causes` lists.
"""
