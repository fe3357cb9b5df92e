"""How rotationzoo talks to hubs: with limits on time and size, and with access tokens kept safe."""
