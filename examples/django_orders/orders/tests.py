"""The project as it runs: an HTTP server, a worker and a broker, all of them real.

python manage.py test
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

from celery import current_app
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test import LiveServerTestCase, override_settings

from celery_toc import timeout_center
from celery_toc.django.models import PendingTask

from .models import Order
from .tasks import expire_order


class OrderTests(LiveServerTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # A broker of the tests' own: nobody else's worker takes their tasks.
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        os.environ["CELERY_BROKER_URL"] = f"toc+embedded://{folder.name}"
        # Orders, and the task library with them, are in the database of the tests.
        database = f"sqlite:///{connection.settings_dict['NAME']}"
        current_app.conf.broker_transport_options = {"toc_library": database}
        cls.center = timeout_center(current_app)
        cls.center.library.create()
        command = [sys.executable, "-m", "celery", "-A", "config", "worker", "--concurrency", "1"]
        worker = subprocess.Popen(
            command,
            cwd=settings.DATA.parent,
            env={**os.environ, "DATABASE": database},
        )
        cls.addClassCleanup(worker.wait, 30)
        cls.addClassCleanup(worker.terminate)
        deadline = time.monotonic() + 30
        while not current_app.control.ping(timeout=0.5):
            assert worker.poll() is None, "the worker has ended"
            assert time.monotonic() < deadline, "the worker does not answer"

    def request(self, path, **form):
        """The status and the body of an answer; a POST if there is a form."""
        try:
            with urlopen(self.live_server_url + path, urlencode(form).encode() or None) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)

    def place(self):
        status, order = self.request("/orders/", item="tea")
        self.assertEqual(status, 201)
        return Order.objects.get(pk=order["id"])

    def wait_for(self, holds):
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline, "it does not come about"
            time.sleep(0.05)  # it does in another process

    @override_settings(ORDER_TIMEOUT=1)
    def test_an_order_that_is_not_paid_expires(self):
        order = self.place()
        self.assertEqual(self.request(f"/orders/{order.pk}/")[1]["status"], "pending")
        self.wait_for(lambda: self.request(f"/orders/{order.pk}/")[1]["status"] == "expired")
        status, answer = self.request(f"/orders/{order.pk}/pay/", by="card")
        self.assertEqual((status, answer["status"]), (409, "expired"))

    def test_a_paid_order_has_no_timeout_any_more(self):
        order = self.place()
        # It is put after the commit.
        self.wait_for(lambda: self.center.get(str(order.timeout_id)))
        status, answer = self.request(f"/orders/{order.pk}/pay/", by="card")
        self.assertEqual((status, answer["status"]), (200, "paid"))
        self.assertEqual(self.center.get(str(order.timeout_id)), [])

    def test_a_timeout_that_comes_too_late_leaves_a_paid_order_paid(self):
        order = self.place()
        self.request(f"/orders/{order.pk}/pay/", by="card")
        expire_order(order.pk)
        order.refresh_from_db()
        self.assertEqual(order.status, Order.Status.PAID)

    def test_an_order_is_paid_once(self):
        order = self.place()
        self.assertEqual(self.request(f"/orders/{order.pk}/pay/", by="card")[0], 200)
        self.assertEqual(self.request(f"/orders/{order.pk}/pay/", by="card")[0], 409)

    def test_an_order_that_is_rolled_back_has_no_timeout(self):
        with self.assertRaises(ValueError), transaction.atomic():
            self.client.post("/orders/", {"item": "tea"})
            order = Order.objects.get()
            raise ValueError
        self.assertFalse(Order.objects.exists())
        self.assertFalse(PendingTask.objects.of(order.pk, "order").exists())
        self.assertEqual(self.center.get(str(order.timeout_id)), [])

    def test_the_timeout_of_an_order_is_in_the_admin(self):
        order = self.place()
        self.client.force_login(User.objects.create_superuser("admin"))
        page = self.client.get(f"/admin/celery_toc/pendingtask/?q=order+{order.pk}")
        self.assertContains(page, str(order.timeout_id))
