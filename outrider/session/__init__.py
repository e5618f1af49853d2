"""What Redis keeps: workers, session records and token logs."""
