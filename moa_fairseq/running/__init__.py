"""Running commands in folders that one run has to itself."""
