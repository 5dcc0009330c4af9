"""Traces whose truth is known without reading them.

``model`` holds a small transformer that counts, part by part, how often it is entered outside
and inside a backward pass; ``nesting`` and ``lookalikes`` list the cases; ``record`` trains
one of them under plain ``torch.profiler`` and gives the counts back as a ``Truth``.

    python -m tests.cases FOLDER [NAME…]

writes ``NAME.json.gz`` (the trace) and ``NAME.truth.json`` for each case.
"""
