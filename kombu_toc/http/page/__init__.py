"""The page: what a person sees of a timeout center, and does to it, in a browser.

Its HTML is made here and escaped by construction (:mod:`.html`); one small script looks again and
knows keys (``page.js``). Nothing is loaded from anywhere else.
"""

from __future__ import annotations

from ..mask import Mask as Mask
from .door import Visitor as Visitor
from .extras import FiringRow as FiringRow
from .extras import PageExtras as PageExtras
from .extras import ScheduleRow as ScheduleRow
from .extras import WorkerRow as WorkerRow
from .page import Page as Page
from .reading import Parts as Parts
