"""Engine modules, one per engine, and the file formats that they share."""
