"""What a run must keep to be valid: every threshold of the monitor in one place.

Changing one needs the distributions of quiet runs in docs/LOG.md.
"""

LATENESS_P99_MS = 1.0
"""A delay line whose packets leave later than this (or LATENESS_SHARE of the shortest delay, if that is more)."""
LATENESS_SHARE = 0.02
LATENESS_MAX_MS = 25.0
"""One packet later than this (or LATENESS_MAX_SHARE of the shortest delay): a pause that a WAN does not have."""
LATENESS_MAX_SHARE = 0.5
STEAL_SHARE = 0.05
"""Time that the hypervisor took from this machine, as a share of all CPU time."""
THROTTLED_SHARE = 0.01
"""Time in which a control group's quota held this process back, as a share of the wall time."""
OVERRUN_SHARE = 0.05
"""Paced steps that took more than 5 % longer than their pace, as a share of all."""
EVENT_LATE_S = 0.25
"""A change by an event that was in effect so much later than asked for was another one."""
EVENT_RESTART_LATE_S = 2.0
"""Starting a program again takes the time that a program takes to start."""
OVERRUN_TIME_SHARE = 0.02
"""Time that paced computation took beyond its pace, as a share of the pace: one long pause in a long run."""
