"""Every private name of Kombu's and redis-py's that this package touches, one file a subject.

Each file's docstring says what it touches, why no public way exists, in which versions that was
read, and what is lost without it. `registry` checks on start that it is there.
"""
