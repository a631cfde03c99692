"""What recipes are made of: students with their losses, rows that teach, evaluations on held-out text, plans."""
