"""What has been spent: the record on disk, and what it says in words."""
