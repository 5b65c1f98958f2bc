"""Recipes: short functions that return a run. They stand in the package, so that an installed one has them.

`atlas train lm preset=atlas size=60M` calls `lm(preset="atlas", size="60M")`. A recipe of one's own is a
function in any file, `atlas train my_recipes.py:mine`, and may begin with one of these.
"""
