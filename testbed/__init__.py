"""The network: topology to containers and shaped links to measured facts."""
