"""One file with all that a board needs: `edgepool package` writes, checks and unpacks it."""
