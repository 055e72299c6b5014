"""What is left of a run for people to read: pictures and documents."""
