"""Published rotations: the index that lists them, and how to push, pull and regenerate them."""
