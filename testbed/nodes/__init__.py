"""What a node is: a namespace container (Mininet)."""
