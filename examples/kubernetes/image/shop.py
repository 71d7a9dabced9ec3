"""The app: a task, and what tells the probes of a worker that it works."""

import os
from pathlib import Path

from celery import Celery, bootsteps

app = Celery("shop", broker=os.environ["TOC_BROKER"])
app.conf.task_default_queue = "mail"
# A task that a killed worker had begun runs again: so it should do no harm twice.
app.conf.task_acks_late = True

ALIVE = Path(os.environ.get("ALIVE_FILE", "/tmp/alive"))


class Alive(bootsteps.StartStopStep):
    """Touches a file every five seconds while the worker consumes and its loop turns."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer, **options):
        ALIVE.unlink(missing_ok=True)  # of this container before it was started again

    def start(self, consumer):
        ALIVE.touch()
        consumer.timer.call_repeatedly(5, ALIVE.touch)


app.steps["consumer"].add(Alive)


@app.task
def remind(order):
    print(f"remind {order}")
