"""Ways to run the same base model faster on one kind of hardware."""
