"""The task library in Django: unmanaged models, and pages of the admin that only show.

Put ``celery_toc.django`` into ``INSTALLED_APPS``. Nothing imports this package otherwise. Django
4.2 and later.
"""
