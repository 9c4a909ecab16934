"""What changes while a network is up: what people write, when it happens, and how it is done and read back."""
