"""The functions that take a center take a TaskCenter, too, which wraps one."""

from __future__ import annotations

from celery import Celery

import kombu_toc
from celery_toc import TaskCenter
from celery_toc.metrics import TimeoutCenterCollector, metrics_text
from kombu_toc import TimeoutCenter

from ..support.inspection import put_some


def test_functions_that_take_a_center_take_a_task_center(center: TimeoutCenter) -> None:
    """Of a message that was acknowledged, and one that waits."""
    center.queues.declare("mail", slots=2)
    put_some(center, "mail", ("a", "b"), body=b"x" * 1000)
    center.ack(center.pop("mail", 1).messages)
    center.metrics.send(center.runner)
    tasks = TaskCenter(Celery("shop", set_as_current=False), center)
    totals = kombu_toc.read_metrics(tasks, ["mail"])["mail"].totals
    assert (totals["put"], totals["acked"]) == (2, 1)
    assert kombu_toc.read_script_times(tasks)["put"].calls == 2
    sizes = kombu_toc.estimate_memory(tasks, ["mail"])
    assert sizes is not None and sizes["mail"] > 1000
    assert 'celery_toc_messages{state="ready",topic="mail"} 1.0' in metrics_text(tasks)
    assert [family.name for family in TimeoutCenterCollector(tasks).collect()]
    assert kombu_toc.reshard_topic(tasks, "mail", 1, settle=0.0).done
    assert tasks.registry.declared("mail").slots == 1
    assert len(tasks.get("b")) == 1
