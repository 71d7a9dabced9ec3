"""A server is killed and its replica takes over: what a producer sees of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kombu import Connection, Queue

import kombu_toc
from kombu_toc.model.topic import slot_of

from ..support.cluster import Cluster
from ..support.sentinels import Deployment

#: As Celery repeats a publish unless it is told otherwise: for less than a second in all.
POLICY = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.2}


@pytest.mark.parametrize("home", [True, False])
def test_a_publish_waits_for_the_replica_that_takes_over(
    start_cluster: Callable[..., Cluster], home: bool
) -> None:
    """Whichever node is away: the one with what belongs to no single slot, or another."""
    cluster = start_cluster(replicas=1)
    with Connection(cluster.toc_url, connect_timeout=10) as connection:
        queue = Queue("takeover")
        queue(connection).declare()
        toc = kombu_toc.center_for(cluster.toc_url)
        hub = cluster.node_of("{toc}")
        owners = [cluster.node_of(slot.body) for slot in toc.registry.topic("takeover").all_slots()]
        number = next(n for n, node in enumerate(owners) if (node is hub) == home)
        ids = [id for id in map(str, range(500)) if slot_of(id, len(owners)) == number][:20]
        producer = connection.Producer()

        def publish(id: str) -> None:
            how = {"retry": True, "retry_policy": POLICY}
            producer.publish({}, headers={"id": id}, routing_key="takeover", **how)

        publish(ids[0])
        cluster.kill(owners[number])
        for id in ids[1:]:
            publish(id)
        toc.client.close()
        toc = kombu_toc.center_for(cluster.toc_url)  # one that knows nothing of the dead node
        heir = cluster.node_of(toc.registry.topic("takeover").slot(number).body)
        assert heir is not owners[number]
        # What was published before may be gone with the primary: replicas follow when they can.
        assert {found.id for found in toc.scan("takeover").messages} >= set(ids[1:])
        toc.client.close()


def test_a_publish_waits_for_the_master_that_takes_over(failing: Deployment) -> None:
    with Connection(failing.toc_url, connect_timeout=10) as connection:
        how = {"declare": [Queue("takeover")], "retry": True, "retry_policy": POLICY}
        for number in range(2):
            headers = {"id": str(number)}
            connection.Producer().publish({}, headers=headers, routing_key="takeover", **how)
            if not number:
                failing.primary.kill()
    assert failing.acting() is not failing.primary
