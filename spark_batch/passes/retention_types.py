"""The types of retention that passes apply: the rules, by the names that history has for them.

Importing it needs no PySpark: the scheduler reports passes without it.
"""

from typing import Final

EXPIRED: Final = "expired"
COMPLETED: Final = "completed"
MAX_WAIT_TIME_EVICTION: Final = "max_wait_time_eviction"
INACTIVE_QUEUE: Final = "inactive_queue"
OLD_RECORDS: Final = "old_records"
ABANDONED_GROUP: Final = "abandoned_group"
