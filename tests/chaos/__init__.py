"""Breaks everything there is to break, and counts what became of the tasks.

::

    python -m tests.chaos --seconds 60 --seed 1
    python -m tests.chaos --broker cluster --seconds 120
    python -m tests.chaos --transport redis --faults kill,cut --json report.json

Two producers send tasks to three queues for so many seconds, about half of them with an ETA 0.1 to
10 seconds ahead. Of the product there are two queues more: of ``keyed``, the tasks of a key run one
by one in order; of ``few``, three tasks run at once. Three workers run them: two of processes
(``-c 2``), one of threads (``-c 4``), with ``acks_late`` and ``reject_on_worker_lost``. One task in
seven is acknowledged before it begins, and sends itself again under its id, once or twice, 0.1 to 3
seconds later. Of the others, one in seven puts its own job again for later, under its id and with
its bytes, and is then acknowledged (not into the two queues more, nor with a library); and one in
eight asks three times to be put back into its queue before it runs. All reach the broker through a
proxy (`tests.support.proxy`); the broker is a real server that syncs each write to its disk. Faults
come one after the other, at least two seconds apart, as a schedule says that depends on the seed
alone:

=========  =======================================================================================
kill       SIGKILL of a worker with its pool; of one process of a pool
term       SIGTERM: a warm shutdown, which must end within 20 seconds; SIGQUIT: a cold one, which
           gives back what was running: that runs again, and is told so
stop       SIGSTOP of a worker with its pool: for longer than the visibility timeout; for less
fleet      SIGKILL of all workers at once
flood      400 short tasks for one queue at once
cut        all connections are reset; in the middle of a reply; before a publish, an
           acknowledgement or a pop is answered
freeze     nothing passes for a while; replies stop halfway, until the connections are reset
restart    of the server, with SIGTERM and with SIGKILL; one that keeps it away for longer than
           the visibility timeout
frozen     SIGSTOP of the server, for longer than the visibility timeout
clock      of the server: seven seconds forward, which is more than a lease; and back
full       of the server: ``maxmemory`` is reached, with ``noeviction``
flush      SCRIPT FLUSH
=========  =======================================================================================

``--broker cluster`` is three primaries with a replica each, ``--broker sentinel`` a master with a
replica and three sentinels, without the proxy. Instead of the faults of network and server there
are:

=========  =======================================================================================
node       SIGKILL of a primary, also of the one with ``{toc}``; it is started again, as a replica.
           A node that crashes and is back before anybody takes its place
failover   by hand
pause      SIGSTOP of a primary: for less than the node timeout; for more
migrate    hash slots of the queue, or the one of ``{toc}``, move to other nodes
grow       a primary and its replica join and get slots; the next time they leave
cut        all clients' connections are closed
flush      SCRIPT FLUSH
=========  =======================================================================================

=========  =======================================================================================
master     SIGKILL; a failover that a sentinel is told to do; SIGSTOP until it has been replaced
sentinel   SIGKILL of one of them
=========  =======================================================================================

On a Cluster one of the three workers runs greenlets (``-P gevent -c 4``), and somebody asks all
workers over remote control all the time, into reply queues on all nodes. No such call may hold a
worker, and at the end each must answer.

These come two seconds apart at least, but only when the servers are whole again. Redis replicates
without waiting, so a server that takes over may not have heard the last of its predecessor. For
that reason producers set ``toc_wait_replicas=1``: what a publish returned for is not to be lost.
What workers did is not waited for, so a run is *explained* as well if its message lay on a server
that was replaced, and the earlier run began or ended from a second before that until all was whole.

``--library`` gives producers and workers a task library of two databases, PostgreSQL and SQLite
unless ``--engines`` says otherwise. Besides kill, fleet, cut and restart there are:

=========  =======================================================================================
lost       Redis: FLUSHALL, or replaced by an empty one. ``celery toc library rebuild`` puts back
           what is pending; one time in two it is killed, and begun again
alone      FLUSHALL, and nobody does that: the workers find what is overdue
database   of the two one is away: SIGKILL, and started again some seconds later; SIGSTOP; of
           SQLite, somebody else writes
step       a worker, a process of its pool, or a producer kills itself: before or after any
           statement to a database, or command to the broker (`deaths`). Producers are started
           again, too
keeper     SIGKILL of the worker that looks after the library: it puts what is missing or far ahead,
           and writes rows behind the messages
=========  =======================================================================================

There, a killed process explains that a task runs again only if the first run had ended less than
two seconds before, or if its database was away since: only then it may be unsaid that it had ended.
The loss of Redis explains it only of what ended while its database was away. At the end no row may
be pending, each task that has run must be done in the library, and library and Redis must agree
(``center.library.check()``).

``--library MODE`` declares all queues so, and looks at what that promises besides (`modes`):

=========  =======================================================================================
through    as queues are by default
outbox     producers commit an order and its task in one transaction, in the one database that
           there is, and roll back one in ten. Whether they were told or not: the order is there if
           and only if its task has run
behind     rows are written after the messages. What had none when Redis lost everything may be
           missing: only what was sent since the oldest entry that was unwritten then. That is three
           seconds old at most, unless nobody could write rows: the worker that does so was killed,
           or a database was away
guard      ``x-guard``: tasks that have ended are sent again under their ids, and do not run, unless
           a database was away
far        ``x-horizon``: half of what is ahead is further than the horizon, 60 seconds. It is in
           Redis 20 seconds before its time at least, and starts within two seconds of it, unless
           Redis lost it since, and nobody rebuilt
=========  =======================================================================================

``--soak`` is a run with a library, in which a client puts, leases and settles over HTTP and looks
at the page, and a schedule fires; a fault comes every 20 seconds. At the end, memory, descriptors,
connections and keys are what they were at first (`soak`).

A worker that has ended is started again. After the last fault all are given time to finish:
until everything that was sent has run and nothing is left in the broker, or until nothing has
happened for 30 seconds.

What counts is kept apart from all that: producers and tasks write each step into a *ledger*, a
server of its own that no fault touches. From it the report is made (`verdict`):

lost         ``apply_async`` returned, and the task never finished; or one of the times that it sent
             itself again, or for which it put its own job. What was acknowledged before it began
             goes with its worker when that is killed, as Celery has it: it is counted apart
early        started before its ETA, both by this machine's one clock, without any tolerance:
             the clock, the ETA and the broker's clock have microseconds, the broker's times
             have milliseconds, rounded up. While the broker's clock is ahead, its time counts
starved      waited for 8 seconds in which no task of its queue was started, but 30 of other queues
             that were due later
duplicated   ran again. *Explained* is that only if the earlier run's worker (or its process of
             the pool) was killed, or stopped for longer than the visibility timeout, after that
             run's start and before the next; or if the later run's worker was stopped for so long
             with the message in its hands, and started it when it went on. Lost connections,
             restarts and shutdowns explain nothing. Each run explains one other run at most.
             This holds for tasks whose ``apply_async`` raised as well: they may run once or not
             at all
crowded      began while as many were running as may run at once: one of each key of the queue
             ``keyed``, three of the queue ``few``. A run goes on until it has finished, or until a
             fault that explains that it runs again
disordered   of the queue ``keyed``: began before a task of its key that was due earlier, and that
             was there. A task that sends itself again holds its key until it has run for the last
             time
stuck        still in the broker when nothing happened any more
keys left    of slots, in a broker that should hold no message

Of the duplicates that are not explained, those are told apart that look like a publish that was
sent twice: the later run is no redelivery, and the connection failed while it was being sent.

The visibility timeout is 5 seconds, for peers too: what a lease means to each is what is to be
compared. ``--transport redis`` is Kombu's own transport, in the same environment.
``--transport valkey`` is celery-redis-plus, which wants an environment of its own::

    python3.13 -m venv plus
    plus/bin/pip install celery-redis-plus 'redis>=7.1,<8' 'valkey>=6.1,<7'
    python -m tests.chaos --transport valkey --python plus/bin/python

For a peer, whatever keys there are that hold messages count as left.
"""
