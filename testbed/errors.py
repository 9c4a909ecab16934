"""What can go wrong in the testbed, in two kinds that the command line tells apart by exit status."""


class TopologyError(ValueError):
    """The request was wrong: file, key, what was found and what is allowed, in one sentence (exit 2)."""


class TestbedError(RuntimeError):
    """The request was right but this machine or this run could not fulfil it (exit 1)."""

    __test__ = False  # not a pytest class, in spite of its name


class NetworkBroke(TestbedError):
    """The network itself failed while programs ran: what they measured is not to be believed."""


class ProgramFailed(TestbedError):
    """A program in a node died or stopped making progress.

    Attributes:
        node: name of the node that failed first.
        log: path of its log.
    """

    def __init__(self, node: str, what: str, log: str) -> None:
        self.node, self.what, self.log = node, what, log
        super().__init__(f"node {node}: {what}; its log is {log}")
