"""The science: routers, losses, one module per paper, one shared attention core."""
