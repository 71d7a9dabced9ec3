"""Recurring tasks: schedules that the center keeps, and that any worker carries on."""
