import uuid

from django.db import models


class OrderQuerySet(models.QuerySet):
    def settle(self, status):
        """Give those of these orders that are still pending that status; return how many.

        One UPDATE with its condition: of a payment and a timeout that come at the same moment,
        one finds the order pending, and the other does nothing.
        """
        return self.filter(status=Order.Status.PENDING).update(status=status)


class Order(models.Model):
    class Status(models.TextChoices):
        PENDING = "pending"
        PAID = "paid"
        EXPIRED = "expired"

    item = models.CharField(max_length=100)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.PENDING)
    due = models.DateTimeField(help_text="until when it can be paid")
    # Chosen with the order and not when the task is sent: whoever sees the order can cancel it.
    timeout_id = models.UUIDField(default=uuid.uuid4, help_text="id of the task that expires it")

    objects = OrderQuerySet.as_manager()

    class Meta:
        indexes = [models.Index(fields=["status", "due"])]

    def as_dict(self):
        return {"id": self.pk, "item": self.item, "status": self.status, "due": self.due}
