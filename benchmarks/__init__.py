"""Programs that run celery-toc beside its peers: the same work, one machine, one run.

``python -m benchmarks --help``; what is measured is in ``measure/``, one module each.
"""
