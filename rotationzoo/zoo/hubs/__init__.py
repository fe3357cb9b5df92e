"""The hubs that hold zoo repositories: one module per hub behind a common protocol."""
