"""The `edgepool` command: parses, calls one library function, prints."""
