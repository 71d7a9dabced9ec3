from celery import shared_task

from .models import Order


# Acknowledged when it is done, so that it is run again if its worker is killed. That, and a
# payment in the meantime, does no harm: it asks for the order's state.
@shared_task(acks_late=True)
def expire_order(pk):
    Order.objects.filter(pk=pk).settle(Order.Status.EXPIRED)
