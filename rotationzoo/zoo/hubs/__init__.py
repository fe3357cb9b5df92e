"""The hubs that hold zoo repositories, one module each behind one protocol; see `registry`."""
