"""Pages of the admin on what is pending and what has ended. They show, and change nothing."""

from __future__ import annotations

import json
import time
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import Q
from django.http import HttpResponseRedirect
from django.urls import NoReverseMatch, reverse
from django.utils.functional import cached_property

from . import models
from .apps import has_table

#: Rows that are counted, and can be paged through: to count all of a large table takes long.
COUNTED = 10_000

_HOUR, _DAY = 3_600_000_000, 86_400_000_000


class BoundedPaginator(Paginator):
    """Counts no more than so many."""

    @cached_property
    def count(self) -> int:
        return int(self.object_list.order_by()[:COUNTED].count())


class RowList(ChangeList):
    """A list whose links name a row by all that tells it from others, in an order that an index
    has."""

    def get_ordering(self, request: Any, queryset: Any) -> list[str]:
        # With one more column, as Django adds it, all rows would have to be sorted.
        return ["-day"] if self._is_by_day(queryset) else list(self.lookup_opts.ordering)

    def _is_by_day(self, queryset: Any) -> bool:
        """Whether only some days are asked for where a day is no partition, but has an index."""
        chosen = EndedFilter.parameter_name in self.params
        return chosen and connections[queryset.db].vendor == "sqlite"

    def get_results(self, request: Any) -> None:
        super().get_results(request)
        if self.multi_page and "day" in self.model.KEY and not self._is_by_day(self.queryset):
            first = self.list_per_page * (self.page_num - 1)
            self.result_list = self._by_status(first, self.list_per_page)

    def _by_status(self, first: int, number: int) -> list[Any]:
        """So many rows from one on. Each status is asked for apart: of all that have ended, MySQL
        would sort all."""
        rows: list[Any] = []
        for status in sorted(models.Status.values, reverse=True):
            mine = self.queryset.filter(status=status)
            there = mine.order_by()[:first].count() if first else 0
            if there == first:  # as many are behind these, perhaps
                rows += mine[first : first + number - len(rows)]
            first -= there
            if len(rows) == number:
                break
        return rows

    def url_for_result(self, result: Any) -> str:
        key = json.dumps([getattr(result, name) for name in result.KEY])
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        site: str = self.model_admin.admin_site.name
        return str(reverse(name, args=(quote(key),), current_app=site))


class DueFilter(admin.SimpleListFilter):
    """By action time."""

    title, parameter_name = "due", "due"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        return [
            *(("overdue", "overdue"), ("hour", "within an hour"), ("day", "within a day")),
            *(("later", "later"), ("past_hour", "in the last hour")),
            ("past_day", "in the last day"),
        ]

    def queryset(self, request: Any, queryset: Any) -> Any:
        now = time.time_ns() // 1000
        bounds: dict[str, dict[str, int]] = {
            "overdue": {"action_us__lt": now},
            "hour": {"action_us__gte": now, "action_us__lt": now + _HOUR},
            "day": {"action_us__gte": now, "action_us__lt": now + _DAY},
            "later": {"action_us__gte": now + _DAY},
            "past_hour": {"action_us__gte": now - _HOUR, "action_us__lt": now},
            "past_day": {"action_us__gte": now - _DAY, "action_us__lt": now},
        }
        return queryset.filter(**bounds.get(self.value(), {}))


class EndedFilter(admin.SimpleListFilter):
    """By the day on which it has ended: history is kept by days."""

    title, parameter_name = "ended", "ended"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        return [("0", "today (UTC)"), ("1", "since yesterday"), ("7", "in the last 7 days")]

    def queryset(self, request: Any, queryset: Any) -> Any:
        chosen = self.value()
        if chosen not in ("0", "1", "7"):
            return queryset
        return queryset.filter(day__gte=time.time_ns() // 1000 // _DAY - int(chosen))


class ReadOnlyAdmin(admin.ModelAdmin):
    """Shows, and changes nothing."""

    def has_add_permission(self, request: Any, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission


class TaskAdmin(ReadOnlyAdmin):
    """Finds tasks by id, business id, status and time. The arguments of tasks are not shown."""

    list_display: tuple[str, ...] = (
        *("id", "name", "topic", "business", "status", "due", "attempts", "modified"),
    )
    #: words of which each is an id, a business id or a business type, one of the first two among
    #: them: an index serves these
    search_fields = ("id__exact", "biz_id__exact", "biz_type__exact")
    search_help_text = "An id or a business id; a business type beside it"
    list_filter: tuple[Any, ...] = ("status", DueFilter)
    show_full_result_count = False
    paginator = BoundedPaginator
    actions = None
    #: no index has any other order
    sortable_by = ()
    shown: tuple[str, ...] = (
        *("id", "token", "topic", "name", "status", "due", "biz_type", "biz_id", "attempts"),
        *("worker", "error", "created", "modified"),
    )

    def get_changelist(self, request: Any, **kwargs: Any) -> type:
        return RowList

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> Any:
        words = search_term.split()
        if not words:
            return queryset, False
        found = Q(pk__in=())
        for at, word in enumerate(words):
            for name in ("id", "biz_id"):
                which = Q(**{name: word})
                for other in words[:at] + words[at + 1 :]:
                    which &= Q(id=other) | Q(biz_id=other) | Q(biz_type=other)
                # One by one: of conditions that are all "or", an index may serve none.
                if queryset.order_by().filter(which).exists():
                    found |= which
        return queryset.filter(found), False

    def get_object(self, request: Any, object_id: str, from_field: str | None = None) -> Any:
        names = self.model.KEY
        try:
            values = json.loads(unquote(object_id))
        except ValueError:
            values = None
        if not isinstance(values, list) or len(values) != len(names):
            names, values = ("id",), [unquote(object_id)]  # a link by the id alone
        rows = self.get_queryset(request).filter(**dict(zip(names, values, strict=True)))
        return rows.first()

    def get_fields(self, request: Any, obj: Any = None) -> tuple[str, ...]:
        return self.shown

    get_readonly_fields = get_fields

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        """Nobody may look at a table that is not there: then there is no library."""
        return super().has_view_permission(request, obj) and has_table(self.model)

    @admin.display(description="task", ordering="task")
    def name(self, row: Any) -> str | None:
        return row.task

    @admin.display(description="business")
    def business(self, row: Any) -> str | None:
        return " ".join(part for part in (row.biz_type, row.biz_id) if part) or None


class PendingAdmin(TaskAdmin):
    list_display = (*TaskAdmin.list_display, "place")
    shown = (*TaskAdmin.shown, "place", "priority")


class EndedAdmin(TaskAdmin):
    list_filter = ("status", EndedFilter)


class CenterAdmin(ReadOnlyAdmin):
    """Leads to the page, if it is among the addresses: from the admin's index, too."""

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        return _page() is not None and any(map(request.user.has_perm, PERMISSIONS))

    has_module_permission = has_view_permission

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        if not self.has_view_permission(request):
            raise PermissionDenied
        return HttpResponseRedirect(str(_page()))


#: With any of these somebody may look at the page or act on it.
PERMISSIONS = tuple(f"celery_toc.{code}" for code, _ in models.Center._meta.permissions)


def _page() -> str | None:
    """Where the page is."""
    try:
        return str(reverse("celery_toc_page", args=("",)))
    except NoReverseMatch:
        return None


admin.site.register(models.Center, CenterAdmin)
for _model in models.MODELS:
    admin.site.register(_model, EndedAdmin if "day" in _model.KEY else PendingAdmin)
