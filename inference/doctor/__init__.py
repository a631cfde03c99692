"""What is wrong with a drafter: how it is read, what it was made for, where it agrees with the target."""
