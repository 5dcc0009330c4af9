"""Traces whose truth is known without reading them.

``model`` holds a small transformer that counts, part by part, how often it is entered outside
and inside a backward pass, and ``watch`` counts the same on models of others; ``nesting``,
``huggingface``, ``architectures``, ``bystanders``, ``hooks``, ``schedules``, ``places``,
``stacks``, ``discarded``, ``distributed`` and ``compiled`` list the cases; ``case.record`` trains
one of them under plain ``torch.profiler`` and gives the counts back as a ``Truth``.
``python -m benchmarks accuracy`` records them all and prints truth beside answer.

    python -m benchmarks accuracy [NAME…] --group core --keep FOLDER

writes ``NAME.json.gz`` (the trace) and ``NAME.truth.json`` for each case of ``nesting``.
"""

# Names the folder in which the processes of a test run share what they recorded.
SHARED = "RECOMPUTE_SCAN_TEST_CASES"
