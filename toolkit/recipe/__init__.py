"""The recipe: what a person writes. Sections, schema, YAML, documentation and checks of single recipes.

May import `errors`, `secrets` and `units`; no torch.
"""

from toolkit.recipe.sections import Recipe

__all__ = ["Recipe"]
