"""From data to a number: data sets, recipes, scores, studies."""
