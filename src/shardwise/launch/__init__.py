"""From a recipe to what starts the ranks. Training never runs inside the process of the command line."""
