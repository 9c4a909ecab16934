"""One file per impairment: rate by htb, delay by netem, delay by NFQUEUE."""
