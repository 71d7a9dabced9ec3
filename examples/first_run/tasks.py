"""The app of the first run: an ordinary Celery app, but for its broker URL."""

import os
import time
from datetime import datetime

from celery import Celery

from kombu_toc import EmbeddedServer

DIRECTORY = os.environ["FIRST_RUN_DIRECTORY"]

app = Celery("first_run")
app.conf.broker_url = f"toc+embedded://{DIRECTORY}"
# The same server keeps the results.
app.conf.result_backend = EmbeddedServer.join(DIRECTORY).url


@app.task(bind=True, name="first_run.note_lateness")
def note_lateness(self) -> float:
    """Return how many seconds after its ETA this task started; negative if it was early."""
    started = time.time()
    return started - datetime.fromisoformat(self.request.eta).timestamp()
