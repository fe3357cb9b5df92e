"""One module an engine, and the file formats that engines share."""
