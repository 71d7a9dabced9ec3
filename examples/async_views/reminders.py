"""An async view of Django that schedules, moves and cancels tasks; nothing blocks the event loop.

    pip install django 'celery-toc[asyncio]' uvicorn
    uvicorn reminders:application                 # in this folder
    celery -A reminders worker
    curl -X POST 'localhost:8000/orders/7/reminder?minutes=60'
    curl -X POST 'localhost:8000/reminders/ID/move?minutes=5'
    curl -X POST localhost:8000/reminders/ID/cancel

A view of FastAPI or Starlette looks the same.
"""

import os

import django
from celery import Celery
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from celery_toc import aio

app = Celery("reminders", broker=os.environ.get("BROKER", "toc+redis://localhost:6379/0"))


@app.task
def remind(order):
    print(f"order {order} has not been paid")


@csrf_exempt
async def schedule(request, order):
    minutes = float(request.GET.get("minutes", 60))
    result = await aio.send(remind.s(order), countdown=60 * minutes)
    return JsonResponse({"id": result.id}, status=201)


@csrf_exempt
async def move(request, id):
    minutes = float(request.GET.get("minutes", 60))
    moved = await aio.reschedule(id, countdown=60 * minutes, app=app)
    return JsonResponse({"moved": sum(one.moved for one in moved)})


@csrf_exempt
async def cancel(request, id):
    cancelled = await aio.cancel(id, app=app)
    return JsonResponse({"cancelled": sum(one.deleted for one in cancelled)})


urlpatterns = [
    path("orders/<int:order>/reminder", schedule),
    path("reminders/<str:id>/move", move),
    path("reminders/<str:id>/cancel", cancel),
]

if not settings.configured:
    settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="of the example")
    django.setup()

application = get_asgi_application()
