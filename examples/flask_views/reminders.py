"""Views of Flask that schedule, move and cancel a task; it runs in the application's context.

pip install flask celery-toc
flask --app reminders run                     # in this folder
celery -A reminders worker
curl -X POST 'localhost:5000/orders/7/reminder?minutes=60'
curl -X POST 'localhost:5000/reminders/ID/move?minutes=5'
curl -X POST localhost:5000/reminders/ID/cancel
"""

import os

from celery import Celery, Task
from flask import Flask, current_app, request

from celery_toc import timeout_center

application = Flask(__name__)


class FlaskTask(Task):
    def __call__(self, *args, **kwargs):
        with application.app_context():
            return self.run(*args, **kwargs)


app = Celery(
    "reminders",
    broker=os.environ.get("BROKER", "toc+redis://localhost:6379/0"),
    task_cls=FlaskTask,
)
app.set_default()  # for requests: each is a thread


@app.task
def remind(order):
    current_app.logger.warning("order %s has not been paid", order)


@application.post("/orders/<int:order>/reminder")
def schedule(order):
    minutes = request.args.get("minutes", 60, float)
    result = remind.apply_async((order,), countdown=60 * minutes)
    return {"id": result.id}, 201


@application.post("/reminders/<id>/move")
def move(id):
    minutes = request.args.get("minutes", 60, float)
    moved = timeout_center(app).reschedule(id, countdown=60 * minutes)
    return {"moved": sum(one.moved for one in moved)}


@application.post("/reminders/<id>/cancel")
def cancel(id):
    cancelled = timeout_center(app).cancel(id)
    return {"cancelled": sum(one.deleted for one in cancelled)}
