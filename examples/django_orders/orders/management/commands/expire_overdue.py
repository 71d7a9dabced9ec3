from datetime import timedelta

from django.core.management.base import BaseCommand
from django.utils import timezone

from orders.models import Order


class Command(BaseCommand):
    help = "Expires orders whose task could not be sent. Let cron run it every few minutes."

    def handle(self, **options):
        # Those that have just come due are their tasks' business.
        overdue = Order.objects.filter(due__lt=timezone.now() - timedelta(minutes=1))
        self.stdout.write(f"orders expired: {overdue.settle(Order.Status.EXPIRED)}")
