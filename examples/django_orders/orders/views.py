from datetime import timedelta

from django.conf import settings
from django.db import connection, transaction
from django.http import HttpResponseBadRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

import celery_toc

from .models import Order
from .tasks import expire_order


@require_POST
def place(request):
    item = request.POST.get("item")
    if not item:
        return HttpResponseBadRequest("an order needs an item\n")
    timeout = settings.ORDER_TIMEOUT
    # The timeout is a row of the same transaction: both are there, or neither is, whatever dies
    # when. Its message is put into Redis after the commit, by this process or by a worker.
    with transaction.atomic(), celery_toc.outbox(connection):
        order = Order.objects.create(item=item, due=timezone.now() + timedelta(seconds=timeout))
        expire_order.apply_async(
            [order.pk],
            countdown=timeout,
            task_id=str(order.timeout_id),
            headers=celery_toc.biz("order", order.pk),
        )
    return JsonResponse(order.as_dict(), status=201)


@require_POST
def pay(request, pk):
    order = get_object_or_404(Order, pk=pk)
    with transaction.atomic():
        paid = Order.objects.filter(pk=pk).settle(Order.Status.PAID)
        if paid:
            # Takes the task out of Redis. Robust: were it to run, it would find the order paid.
            transaction.on_commit(
                expire_order.AsyncResult(str(order.timeout_id)).revoke, robust=True
            )
    order.refresh_from_db()
    return JsonResponse(order.as_dict(), status=200 if paid else 409)


@require_GET
def show(request, pk):
    return JsonResponse(get_object_or_404(Order, pk=pk).as_dict())
