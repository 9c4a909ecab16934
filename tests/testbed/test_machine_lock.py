"""Nobody shares the machine with an emulated run, and a killed holder leaves nothing behind."""

import os
import signal
import subprocess
import sys

import pytest

from testbed.errors import TestbedError
from testbed.machine_lock import MachineLock

NAME = f"\0dilocox-test-{os.getpid()}"
HOLD = """
import sys
from testbed.machine_lock import MachineLock
with MachineLock(sys.argv[1].replace("@", chr(0))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_refused_with_the_first_ones_name():
    refused = pytest.raises(TestbedError, match=rf"another emulated run .*process {os.getpid()}: .*pytest")
    with MachineLock(NAME), refused:
        MachineLock(NAME).__enter__()
    with MachineLock(NAME):
        pass


def test_the_lock_dies_with_its_holder():
    command = [sys.executable, "-c", HOLD, NAME.replace("\0", "@")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(TestbedError, match=f"process {other.pid}"):
            MachineLock(NAME).__enter__()
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=10)
        with MachineLock(NAME):
            pass
