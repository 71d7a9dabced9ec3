"""The page: what a person sees of a timeout center, and does to it, in a browser.

Its HTML is in ``templates``, and escaped by Jinja2 (:mod:`.render`); one small script looks again
and knows keys (``page.js``). Nothing is loaded from anywhere else.
"""

from __future__ import annotations

from ..tokens import Mask as Mask
from .page import Page as Page
from .reading import PageExtras as PageExtras
from .reading import Parts as Parts
from .reading import WorkerRow as WorkerRow
from .sessions import Visitor as Visitor
