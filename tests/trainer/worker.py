"""A process that imports torch once and then runs one function of `jobs` after another as some rank."""

import json
import os
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a job prints is not a reply
    import jobs  # noqa: PLC0415 - only now may it print

    for line in sys.stdin:
        job = json.loads(line)
        os.environ.update(job["environment"])
        try:
            reply = {"value": getattr(jobs, job["function"])(**job["arguments"])}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
