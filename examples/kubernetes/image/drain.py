"""What Kubernetes runs before it stops a worker: the worker takes no more, and ends what it has.

    python drain.py worker@HOSTNAME

It returns when the worker runs no task any more. Until then the worker is there as ever: `inspect`
and `revoke --terminate` reach it, which they do not once it has the signal to end.
"""

import sys
import time

from shop import app

name = sys.argv[1]
control, inspect = app.control, app.control.inspect([name], timeout=5)

control.broadcast("toc_pause", destination=[name], reply=True, timeout=5)
while any((inspect.active() or {}).values()):
    time.sleep(1)
