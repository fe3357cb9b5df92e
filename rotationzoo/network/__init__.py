"""How this program speaks to hubs: with limits on time and size, and with tokens kept safe."""
