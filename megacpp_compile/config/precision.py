"""`PrecisionPlan`: which linear runs in which precision. Frozen, checked, hashable.

The plan is data about names, roles and fp8_gain. `precision/survey.py` compares a model with it, `precision/replace.py`
carries it out on modules, and the pass `linear` on graphs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megacpp_compile.config import checks, fp8_gain, globs
from megacpp_compile.config._deprecated import moved
from megacpp_compile.config.roles import ROLES, role_of
from megacpp_compile.errors import BadOptionError, ManifestError, RuleWithoutHitError

if TYPE_CHECKING:
    from torch import nn

RECIPES = ("bf16", "fp8_current", "fp8_block", "fp8_delayed", "nvfp4")
# No op of a graph multiplies in 4 bits.
UNTRACEABLE = frozenset({"nvfp4"})
FP8_ROLES = ("attention", "experts")
# Modules that hold few FLOPs or whose small errors are amplified: embeddings and the head that shares their weight,
# routing, memories of n-grams, mixes of residual streams, embeddings of structure, platform and time, adapters. Each
# matches inside any segment of a name. One list for modules, compiled graphs and compression.
DEFAULT_EXCLUSIONS = ("wte", "wpe", "lm_head", "router", "shared_expert_gate", "engram", "mhc", "ngram_hash",
                      "structure_emb", "platform_emb", "temporal_", "lora_")  # fmt: skip

_MEANT = {"fp8": "fp8_current", "tensorwise": "fp8_current", "current": "fp8_current", "blockwise": "fp8_block",
          "block": "fp8_block", "delayed": "fp8_delayed", "fp4": "nvfp4", "bfloat16": "bf16",
          "none": "bf16"}  # fmt: skip
_FORMAT = 1  # version of the manifest


@dataclass(frozen=True, slots=True)
class Decision:
    """What the plan says of one linear.

    Attributes:
        requested: the recipe the plan asks for.
        effective: the recipe to run; "bf16" where `reason` rules out the one asked for.
        rule: what asks for it: a pattern of the plan, or "role attention"; a pattern with a word of DEFAULT_EXCLUSIONS
            in it stands above that exclusion, and says so.
        reason: why the two differ, "" when they do not.
        excluded: the exclusion that its name falls under, "" for none.
    """

    requested: str
    effective: str
    rule: str
    reason: str = ""
    excluded: str = ""

    @property
    def recipe(self) -> str:
        """The recipe that names ask for: "bf16" under an exclusion, else `requested`. What shapes, dtypes and devices
        allow of it is for whoever multiplies to say."""
        return "bf16" if self.excluded else self.requested

    @property
    def exclusion(self) -> str:
        """Why an exclusion keeps a linear out of what is requested, and what lets it in; "" where none does."""
        if not self.excluded or self.requested == "bf16":
            return ""
        return f"{self.reason}: a rule that names it puts it in {self.requested} all the same"


def exclusion_of(fqn: str, exclude: Sequence[str] = DEFAULT_EXCLUSIONS) -> str:
    """The first of `exclude` that the name of a linear falls under: words of DEFAULT_EXCLUSIONS inside any segment,
    others as globs over whole names; "" for none."""
    fits = (globs.inside_segment(e, fqn) if e in DEFAULT_EXCLUSIONS else globs.hits(e, fqn) for e in exclude)
    return next((e for e, fit in zip(exclude, fits, strict=True) if fit), "")


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """A recipe for every linear: by its name, else by its role.

    A recipe is one of

    - "bf16": left as it is;
    - "fp8_current": one scale a tensor, from the values it has now; Hopper's default;
    - "fp8_block": scales by blocks (128 x 128 of a weight, 1 x 128 of an activation);
    - "fp8_delayed": one scale a tensor, from the maxima of past steps, so that a cast is one pass. A number that is
      beyond them is saturated; `scaling_state` carries them over a restart. In compiled graphs, routed experts and
      linears that have no past take "fp8_current", as the report says;
    - "nvfp4": 4 bits, with a scale in e4m3 for 16 elements; in modules only, by Transformer Engine 2.8 and newer on
      devices of compute capability 10 and newer. The gate predicts nothing for it.

    Attributes:
        rules: (glob over module names, recipe) pairs, or a mapping; the first that matches the whole of a name wins.
            `globs` defines the patterns.
        roles: role -> recipe for linears that no rule hits; by default "fp8_current" for "attention" and "experts"
            (feed-forward of all kinds), "bf16" for "mamba", "router", "norm", "head", "embedding" and "other", and for
            "attention_core", softmax and the GEMMs around it, which nothing here serves in fp8: reports say why.
        gate: whether a linear stays in bf16 at a shape where fp8 is predicted to gain less than
            `fp8_gain.LEAST_GAIN`, even if a rule hits it.
        disable_rht: of "nvfp4", `disable_rht` of Transformer Engine's `NVFP4BlockScaling`: whether to leave out the
            random Hadamard transform. None takes the target's pin, else Transformer Engine's default; False asks for
            the transform, which is a TargetRecipeError on a target that pins it off (`targets.chips`).

    Raises BadOptionError for a pattern given twice or with an empty segment, for unknown recipes and roles, and for
    `disable_rht` where no rule or role asks for "nvfp4".
    """

    rules: tuple[tuple[str, str], ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    gate: bool = True
    disable_rht: bool | None = None

    def __post_init__(self) -> None:
        rules = globs.rules("precision.rules", self.rules, "recipe", "module names", "*.mlp.*")
        for pattern, recipe in rules:
            _recipe(f"precision.rules[{pattern!r}]", recipe)
        roles = dict(globs.pairs("precision.roles", self.roles, "recipe"))
        for role, recipe in roles.items():
            checks.choice("precision.roles", role, ROLES)
            _recipe(f"precision.roles[{role!r}]", recipe)
        default = {role: "fp8_current" if role in FP8_ROLES else "bf16" for role in ROLES}
        checks.settle(self, rules=rules, roles=tuple((default | roles).items()))
        checks.boolean("precision.gate", self.gate)
        rht = self.disable_rht
        checks.fits("precision.disable_rht", rht, rht in (True, False, None), "True, False or None")
        wanted = "None, as nothing in the plan is in 'nvfp4': other recipes have no Hadamard transform"
        checks.fits("precision.disable_rht", rht, rht is None or "nvfp4" in self.recipes(), wanted)

    @classmethod
    def of(cls, value: Any) -> PrecisionPlan | None:
        """A plan from itself, None, the name of a recipe (for the roles that are in fp8 by default; "bf16" for all),
        a mapping of rules, or a mapping of fields.

        Raises BadOptionError for anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str):
            _recipe("precision", value)
            return cls(roles=tuple((role, value) for role in FP8_ROLES))
        if isinstance(value, Mapping):
            if all(isinstance(recipe, str) for recipe in value.values()):
                return cls(rules=tuple(value.items()))
            return checks.plan(cls, "precision", value)
        wanted = "a PrecisionPlan, a mapping from glob to recipe, or one of " + ", ".join(map(repr, RECIPES))
        raise BadOptionError("precision", value, wanted)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain containers, fit for `of` and JSON."""
        found = {"rules": [list(r) for r in self.rules], "roles": dict(self.roles), "gate": self.gate}
        return found if self.disable_rht is None else {**found, "disable_rht": self.disable_rht}

    def recipe_for(self, fqn: str, role: str | None = None, shape: fp8_gain.Shape | None = None) -> str:
        """The recipe the linear `fqn` runs in; see `decide`."""
        return self.decide(fqn, role, shape).effective

    def decide(
        self, fqn: str, role: str | None = None, shape: fp8_gain.Shape | None = None,
        exclude: Sequence[str] = DEFAULT_EXCLUSIONS,
    ) -> Decision:  # fmt: skip
        """What the plan says of a linear on a device that has fp8.

        fqn: name of the module. role: one of `ROLES`; told by the name where None. shape: (M, N, K), i.e. tokens (None
        where unknown), out features, in features; without a shape the gate is not asked.
        """
        role = role or role_of(fqn)
        pattern = globs.first_hit(dict(self.rules), fqn)
        requested = dict(self.rules)[pattern] if pattern is not None else dict(self.roles)[role]
        rule = pattern if pattern is not None else f"role {role}"
        if excluded := exclusion_of(fqn, exclude):
            if pattern is None or excluded not in DEFAULT_EXCLUSIONS or excluded not in pattern.lower():
                reason = f"excluded by {excluded!r}" if requested != "bf16" else ""
                return Decision(requested, "bf16", rule, reason, excluded)
            rule = f"{pattern}, above the exclusion of {excluded!r}"
        against = fp8_gain.refusal(requested, shape) if self.gate and shape is not None else ""
        return Decision(requested, "bf16" if against else requested, rule, against and f"gate: {against}")

    def recipes(self) -> frozenset[str]:
        """Every recipe the plan can ask for."""
        return frozenset(recipe for _, recipe in (*self.rules, *self.roles))

    def traceable(self) -> PrecisionPlan:
        """The plan with "bf16" in place of recipes that a graph cannot hold ("nvfp4")."""
        rules, roles = (
            tuple((name, "bf16" if recipe in UNTRACEABLE else recipe) for name, recipe in pairs)
            for pairs in (self.rules, self.roles)
        )
        return replace(self, rules=rules, roles=roles, disable_rht=None)

    def without_hit(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """The patterns of rules that hit none of the names."""
        return globs.without_hit(dict(self.rules), fqns)

    def check_hits(self, fqns: Iterable[str], exclude: Iterable[str] = ()) -> None:
        """Raise RuleWithoutHitError for a rule, or a glob of `exclude`, that hits none of the names. fqns: the modules
        that have a weight of their own."""
        weights = list(fqns)
        for pattern in (*self.without_hit(weights), *globs.without_hit(exclude, weights)):
            raise RuleWithoutHitError(pattern, weights)

    def describe(self, target: str = "cuda", reason: str = "") -> str:
        """The plan in words. target: "cuda", "cpu" or "tpu"; reason: why the target has no fp8, "" where it has."""
        if target != "cuda" or reason or self.recipes() == {"bf16"}:
            why = reason or (f"target {target}: no float8 here" if target != "cuda" else "")
            return "precision plan: bf16 everywhere" + (f" ({why})" if why else "")
        lines = ["precision plan:"]
        lines += [f"  {pattern} -> {recipe}" for pattern, recipe in self.rules]
        lines += [f"  role {role} -> {recipe}" for role, recipe in self.roles]
        gain = f"where the predicted gain is {fp8_gain.LEAST_GAIN:.2f} or more" if self.gate else "at every shape"
        return "\n".join((*lines, f"  fp8 {gain}"))

    def manifest(self, model: nn.Module | None = None, **where: Any) -> str:
        """The plan as JSON, to be read back by `from_manifest`.

        Deprecated with a model: `megacpp_compile.precision.survey.manifest(plan, model)` adds a row for every linear.
        """
        if model is not None:
            replacement = moved("PrecisionPlan.manifest(model)", "precision.survey", "manifest")
            return str(replacement(self, model, **where))
        return self.manifest_with(())

    def manifest_with(self, linears: Sequence[Mapping[str, Any]]) -> str:
        """The plan as JSON, with a row for each linear of a model as plain containers."""
        return json.dumps({"format": _FORMAT, "plan": self.to_dict(), "linears": list(linears)}, indent=1)

    @classmethod
    def from_manifest(cls, text: str) -> PrecisionPlan:
        """The plan of a manifest. Raises ManifestError for text that is no manifest of this version."""
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise ManifestError(f"format {data['format']!r}, this version reads {_FORMAT}")
            return cls(**data["plan"])
        except (KeyError, TypeError, json.JSONDecodeError, BadOptionError) as error:
            raise ManifestError(f"{type(error).__name__}: {error}") from error

    def assert_plan(self, model: nn.Module, **where: Any) -> None:
        """Deprecated: `megacpp_compile.precision.survey.assert_plan(plan, model)`."""
        moved("PrecisionPlan.assert_plan", "precision.survey", "assert_plan")(self, model, **where)


def _recipe(key: str, value: Any) -> None:
    if value not in RECIPES:
        meant = _MEANT.get(value.lower()) if isinstance(value, str) else None
        raise BadOptionError(key, value, "one of " + ", ".join(map(repr, RECIPES)), RECIPES, meant)
