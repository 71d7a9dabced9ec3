"""The queues of a run. Imports nothing: the harness and the app both need it."""

#: What the workers consume. Producers send to all of them; a flood goes to one.
QUEUES = ("celery", "second", "third")

#: Queues of the product that limit what starts, and how. Producers send to these too, and each
#: task for them has one of so many keys.
LIMITED: dict[str, dict[str, object]] = {
    "keyed": {"key_order": "serial"},
    "few": {"concurrency": 3},
}
KEYS = 6

#: Seconds ahead of their time that tasks are put into Redis, where queues have a horizon. It is the
#: shortest that there is.
HORIZON = 60.0
