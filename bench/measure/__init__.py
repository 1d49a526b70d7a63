"""What a push takes on this machine: rows with their provenance, floors, peers, comparison."""
