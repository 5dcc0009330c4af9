"""What must hold on every version of torch: scripts, fixtures and their tests.

``python -m benchmarks versions`` runs the scripts under each version, each in an environment.
"""
