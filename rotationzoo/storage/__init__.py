"""Files and folders by name: safe to follow, written whole or not at all, and read within limits."""
