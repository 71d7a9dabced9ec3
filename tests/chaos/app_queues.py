"""The queues of a run. Imports nothing: the harness and the app both need it."""

#: What the workers consume. Producers send to all of them; a flood goes to one.
QUEUES = ("celery", "second", "third")
