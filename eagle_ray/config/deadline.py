"""Parse `execution.finish_by`: the time by which a job must be done.

    >>> now = datetime(2026, 11, 29, 20, 30, tzinfo=timezone.utc)
    >>> deadline_of("4h", now).isoformat()
    '2026-11-30T00:30:00+00:00'
    >>> deadline_of("06:00 Europe/Berlin", now).isoformat()
    '2026-11-30T06:00:00+01:00'
    >>> deadline_of("2026-11-30T05:00:00Z", now).isoformat()
    '2026-11-30T05:00:00+00:00'

A time of day is the next such time, in this machine's time zone if none is given. A duration counts
from the start of the command.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

DEADLINE_FORM = (
    "a time such as 06:00 or 06:00 Europe/Berlin, a duration such as 4h or 1h30m, or a date and time with its "
    "zone such as 2026-12-01T06:00:00+01:00"
)
_DURATION = re.compile(r"(?:(\d{1,5})d)?(?:(\d{1,6})h)?(?:(\d{1,7})m)?(?:(\d{1,9})s)?")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?:\s+(\S+))?")


def deadline_of(text: str, now: datetime) -> datetime:
    """Return the time that the text stands for, with its time zone. Raises ValueError.

    Args:
        now: current time with its zone, from which a duration and a time of day count.
    """
    text = text.strip()
    if text and (duration := _DURATION.fullmatch(text)):
        days, hours, minutes, seconds = (int(number or 0) for number in duration.groups())
        return _later(now, timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds))
    if clock := _CLOCK.fullmatch(text):
        hour, minute, zone = clock.groups()
        return _next_time(int(hour), int(minute), zone, now)
    return _date_and_time(text)


def check_deadline(text: str) -> str:
    """Return the text unchanged if deadline_of accepts it. Raises ValueError."""
    deadline_of(text, datetime.now(timezone.utc))
    return text


def _later(now: datetime, duration: timedelta) -> datetime:
    if not duration:
        raise ValueError("a duration of nothing")
    try:
        return now + duration
    except OverflowError as error:
        raise ValueError("a duration of thousands of years") from error


def _next_time(hour: int, minute: int, zone: str | None, now: datetime) -> datetime:
    """Return the next moment at which a clock of the zone shows this time."""
    if hour > 23 or minute > 59:
        raise ValueError(f"{hour}:{minute:02d} is no time of day")
    clock = None if zone is None else _zone(zone)
    # What the clock shows, whatever its offset is then.
    here = now.astimezone(clock).replace(tzinfo=None)
    that_day = here.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if that_day <= here:
        that_day += timedelta(days=1)
    return that_day.astimezone() if clock is None else that_day.replace(tzinfo=clock)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError) as error:
        raise ValueError(f"{name!r} is no time zone that this machine knows") from error


def _date_and_time(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(f"{text!r} is no time, duration, or date and time") from None
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no zone, such as {text}+01:00")
    return moment
