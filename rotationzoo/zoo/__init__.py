"""What is published: the index that lists it, and pushing, pulling and regenerating rotations."""
