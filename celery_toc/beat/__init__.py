"""Recurring tasks that were configured for a beat: an app's ``beat_schedule``, and the tables of
django-celery-beat and redbeat."""
