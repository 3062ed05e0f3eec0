"""Recipes by name, and from YAML files that start from one."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fourbits.recipe.overrides import gemms_with_both_sides
from fourbits.recipe.recipe import Recipe
from fourbits.recipe.schedules import get_schedule
from fourbits.recipe.shipped import SHIPPED
from fourbits.settings import build, load_yaml, nearest, to_dict

#: the shipped recipes by name
RECIPES = MappingProxyType({recipe.name: recipe for recipe in SHIPPED})


def list_recipes() -> tuple[str, ...]:
    """The names of the shipped recipes."""
    return tuple(RECIPES)


def get_recipe(recipe: str | Path | Recipe) -> Recipe:
    """A shipped recipe by name, or one read from a YAML file. Errors suggest the nearest recipe or key.

    "nvfp4+late-forward" is a shipped recipe with a shipped schedule. A file may start from a shipped recipe
    with `base: NAME` and set only what differs; a transform set on one operand applies to both operands of
    its GEMM.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"recipe: must be a name, a .yaml file or a Recipe, got {type(recipe).__name__}. Pass one such "
            "as 'nvfp4'."
        )
    if str(recipe) in RECIPES:
        return RECIPES[str(recipe)]
    if Path(recipe).is_dir():
        raise ValueError(f"recipe: must be a name or a .yaml file, got the folder {recipe}. Name a file.")
    base, plus, schedule = str(recipe).partition("+")
    if plus and base in RECIPES:
        return _with_schedule(RECIPES[base], schedule)
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(
                f"recipe: {str(path)!r} must be a file, and there is none. Pass its path, or a shipped name: "
                f"{', '.join(RECIPES)}."
            )
        return recipe_from_mapping(load_yaml(path), str(path), path.stem)
    raise ValueError(
        f"recipe: no recipe is called {str(recipe)!r}.{nearest(str(recipe), list_recipes())} "
        f"Shipped: {', '.join(RECIPES)}. Pass one of them, or a .yaml file."
    )


def _with_schedule(recipe: Recipe, schedule: str) -> Recipe:
    """A shipped recipe with a shipped schedule, under both names."""
    return replace(
        recipe,
        name=f"{recipe.name}+{schedule}",
        taken=f"{recipe.taken}; schedule {schedule}",
        schedule=get_schedule(schedule),
    )


def credited(recipe: Recipe) -> Recipe:
    """The recipe, without the credits of the shipped one if its settings were changed."""
    shipped = RECIPES.get(recipe.name)
    if shipped is None or recipe.digest == shipped.digest or recipe.source != shipped.source:
        return recipe
    return replace(recipe, **_credits_of_changed(recipe.name))


def _credits_of_changed(name: str) -> dict[str, object]:
    return {"source": f"{name}, changed", "taken": "", "deviates": ""}


def recipe_from_mapping(mapping: dict[str, object], where: str, name: str = "custom") -> Recipe:
    """A recipe from nested dicts, on top of the shipped recipe named by `base`, if any.

    where: the prefix of every error, e.g. a file name. name: used where the mapping has none.
    """
    changes = dict(mapping)
    base = changes.pop("base", None)
    tree: dict[str, object] = {"name": name}
    if base is not None:
        if str(base) not in RECIPES:
            raise ValueError(
                f"{where}: base must be a shipped recipe, got {base!r}.{nearest(str(base), list_recipes())} "
                f"Shipped: {', '.join(RECIPES)}."
            )
        tree = _merged(to_dict(RECIPES[str(base)]), {"name": name} | _credits_of_changed(str(base)))
        changes = gemms_with_both_sides(changes)
    if isinstance(named := changes.get("schedule"), str):
        changes["schedule"] = to_dict(get_schedule(named))
    return build(Recipe, _merged(tree, changes), where)


def _merged(base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """base, updated recursively with changes."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return result
