"""The settings of one compilation: frozen, checked, hashable."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from megacpp_compile.config import checks, environment, registered
from megacpp_compile.config._deprecated import RENAMED_OPTIONS, accepts_old_names, renamed
from megacpp_compile.config.checkpointing import AUTO, FREE, KINDS, AutoPolicy, CheckpointingPolicy, policy_option
from megacpp_compile.config.compression import CompressionPlan
from megacpp_compile.config.precision import UNTRACEABLE, PrecisionPlan
from megacpp_compile.config.sharding import ShardingPlan
from megacpp_compile.config.warn_once import warn_once
from megacpp_compile.errors import BadOptionError, UnknownOptionError, UnknownPassError

if TYPE_CHECKING:
    from megacpp_compile import targets

Verify = Literal["off", "each"]
Target = Literal["auto", "cpu", "cuda", "tpu"]
Attention = Literal["default", "fastest"]

# Words people use for a target; string similarity alone would read "gpu" as "cpu".
_TARGET_MEANT = {"gpu": "cuda", "nvidia": "cuda", "triton": "cuda", "xla": "tpu", "openxla": "tpu"}
_KIND_MEANT = {"attention": "ablock", "a": "ablock", "mamba": "mblock", "m": "mblock", "moe": "eblock", "mlp": "eblock",
               "expert": "eblock", "e": "eblock", "recurrent": "rblock", "rnn": "rblock", "r": "rblock"}  # fmt: skip
_PRINTS = ("explain", "summary")  # what decides of what is printed alone, and of no code


class _Asked:
    """`asked`: the fields that the user gave; of a `Config` made by its constructor those that are not the default."""

    __slots__ = ("asked",)
    asked: frozenset[str]


@accepts_old_names
@dataclass(frozen=True, slots=True, eq=False)
class Config(_Asked):
    """What `torch.compile(..., backend="megacpp", options={...})` accepts, as a mapping of fields or as a `Config`.

    The constructor checks types (`BadOptionError`); `from_options`, which is told the passes there are, checks names of
    passes and of Inductor's settings. Mappings are copied and read-only. Old names of fields (`config/_deprecated.py`)
    are taken as keywords, with a FutureWarning. An option that is given and has no effect, on the target or beside the
    others, is warned of once a process (`config/effects.py`).

    Attributes:
        disable: passes not to run. A string is read as a comma-separated list; order and repetition do not matter.
        passes: pass name -> whether to run it; a pass not named runs unless disabled, but for those that are off by
            default (`norm_linear`).
        require: pass name -> number of times it has to fire in a call of the model, else `RequirementError`. A model
            that is one frame is checked when it is compiled. Where it is cut into frames, each counts as often as it
            runs: too many are an error at once, too few at the end of the call.
        strict: raise an error where a frame or a lowering otherwise falls back with a reason in the report, where the
            graph breaks, and where a layer runs across packed documents that another layer keeps apart.
        verify: "each" compares every rewrite with the code it replaced; "off" does not.
        target: what to lower for; "auto" goes by the device of the inputs.
        explain: print the report of every compiled frame to stderr.
        summary: have the process say on stderr, when it ends, which frames fell back whole or ran in eager, and why. It
            says nothing where there are none. Off, frames compiled with these settings are left out.
        keep_latents: save the latent that `down_norm_up` norms instead of recomputing it from its input in backward:
            two bytes a latent channel and token (bf16), and one GEMM less. "auto" saves it on XLA devices, and where
            `policy="auto"` finds the GEMM to take longer than writing and reading the latent.
        fuse_shared_input_gemms: in graphs for CUDA where a pass has fired, multiply linears without a bias that share
            one input, such as MLA's query and key-value down-projections, as one GEMM, in forward and backward; those
            with more than 2048 output channels stay by themselves.
        autotune_gemms: in graphs for CUDA where a pass has fired, time cuBLASLt's candidates for each large
            half-precision GEMM once per shape and process, and run the fastest whose result equals `torch.mm`'s bit
            for bit.
        overlap_collectives: in graphs where a pass has fired and ranks communicate, run GEMMs that need no result of a
            collective while it is under way. Results are the same.
        autotune: choose the block sizes of this package's kernels by measurement on the first call instead of by the
            built-in table. Results are kept in Inductor's cache.
        expert_loops: trace loops over the experts that have tokens as loops over all, where an expert without tokens is
            shown to add nothing and to do nothing else; False leaves them to break the graph. In training, an expert
            with weights of its own has no gradient where the loop skips it, and one of zeros in a graph, which
            optimizers with momentum or weight decay tell apart: "auto" leaves such loops alone, True takes them.
        rolled_loops: trace a few steps of a loop over tokens or chunks in the place of all, where all are shown to be
            one step at consecutive positions and an op serves for the loop; False traces all steps.
        drop_outputs: names of outputs that nobody reads in training, by the variables that hold them: `("logits",)` for
            models that return logits beside the loss. Where a loss of the frame is computed from it, such an output is
            not made, and what stands in its place raises DroppedOutputError when it is used.
        fa4: have FlashAttention-4 (the package flash-attn-4) serve every dense causal attention that it can, those that
            a model writes as `scaled_dot_product_attention` included; where it cannot, the report says why.
        attention: "fastest" has FlashAttention-4 serve those of them where it is faster than torch's own kernel, by a
            measurement when the graph is compiled; the report has both times. Without its package torch's own stay.
        policy: what a training step saves for its backward and what it recomputes there: a `CheckpointingPolicy`, the
            name of an entry for every kind of block ("selective", "full"), a mapping of its fields, a budget of bytes,
            or "auto", the default: in frames where a pass has fired, what lowers the peak and takes no time by
            prediction (at most 0.5 % of a step). `{"auto": 0.02}` lets recomputing take 2 % of it. "none" or None
            leaves it to Inductor.
        block_kinds: glob over module names (`globs`) -> kind of block ("ablock", "mblock", "eblock", "rblock"), where
            `policy` would take it for another; the longest pattern that hits wins.
        precision: which linears run in fp8: a `PrecisionPlan`, a mapping from glob over module names to recipe, or
            the name of a recipe ("fp8_current"). None, the default, leaves all of them in the model's own dtype.
        cache_weight_casts: with `precision`, cast weights to fp8 in front of a compiled frame, and in a context
            `cached_weight_casts()` once for all calls in it: for microbatches of a step, and for inference.
        compress: linears that save a random projection of their input for backward, which makes their weights'
            gradients approximate: a `CompressionPlan`, or a mapping of its fields, as in
            `{"names": ("*.mlp.down_proj",), "ratio": 0.25}`. None, the default, compresses nothing.
        sharding: how parameters are laid out over a mesh of XLA devices: a `ShardingPlan`, or a mapping of its fields.
            Parameters of fused ops are pinned, to a whole copy on every device where no rule hits them.
        repeated_blocks: compile blocks that repeat in a frame once for each kind, and call that code for each block, in
            place of one graph for all: less to compile, by as much as there are blocks. The frame stays whole, with the
            reason in the report, where its blocks cannot be told apart from what is around them; under "auto" also
            where that spares little, or loses fusions across blocks (`frontend/worth_cutting.py`).
        inductor: config patches handed to Inductor as they are, e.g. `{"max_autotune": True}`. They override the
            backend's own: `{"static_launch_user_defined_triton_kernels": False}` makes Triton, not torch, launch
            kernels on CUDA.
    """

    disable: tuple[str, ...] = ()
    passes: Mapping[str, bool] = field(default_factory=dict)
    require: Mapping[str, int] = field(default_factory=dict)
    strict: bool = False
    verify: Verify = "off"
    target: Target = "auto"
    explain: bool = False
    summary: bool = True
    keep_latents: bool | Literal["auto"] = "auto"
    fuse_shared_input_gemms: bool = False
    autotune_gemms: bool = True
    overlap_collectives: bool = True
    autotune: bool = False
    expert_loops: bool | Literal["auto"] = "auto"
    rolled_loops: bool = True
    drop_outputs: tuple[str, ...] = ()
    fa4: bool = False
    attention: Attention = "default"
    policy: CheckpointingPolicy | AutoPolicy | Literal["auto"] | None = AUTO
    block_kinds: Mapping[str, str] = field(default_factory=dict)
    precision: PrecisionPlan | None = None
    cache_weight_casts: bool = False
    compress: CompressionPlan | None = None
    sharding: ShardingPlan | None = None
    repeated_blocks: bool | Literal["auto"] = False
    inductor: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked = {
            "disable": tuple(sorted(set(checks.names("disable", self.disable)))),
            "passes": checks.mapping("passes", self.passes, checks.boolean),
            "require": checks.mapping("require", self.require, checks.count),
            "strict": checks.boolean("strict", self.strict),
            "verify": checks.choice("verify", self.verify, get_args(Verify)),
            "target": checks.choice("target", self.target, get_args(Target), _TARGET_MEANT),
            "explain": checks.boolean("explain", self.explain),
            "summary": checks.boolean("summary", self.summary),
            "keep_latents": checks.boolean_or_auto("keep_latents", self.keep_latents),
            "fuse_shared_input_gemms": checks.boolean("fuse_shared_input_gemms", self.fuse_shared_input_gemms),
            "autotune_gemms": checks.boolean("autotune_gemms", self.autotune_gemms),
            "overlap_collectives": checks.boolean("overlap_collectives", self.overlap_collectives),
            "autotune": checks.boolean("autotune", self.autotune),
            "expert_loops": checks.boolean_or_auto("expert_loops", self.expert_loops),
            "rolled_loops": checks.boolean("rolled_loops", self.rolled_loops),
            "drop_outputs": tuple(sorted(set(checks.names("drop_outputs", self.drop_outputs, "names of outputs")))),
            "fa4": checks.boolean("fa4", self.fa4),
            "attention": checks.choice("attention", self.attention, get_args(Attention)),
            "policy": policy_option(self.policy),
            "block_kinds": checks.mapping("block_kinds", self.block_kinds, _kind),
            "precision": _traceable(PrecisionPlan.of(self.precision)),
            "cache_weight_casts": checks.boolean("cache_weight_casts", self.cache_weight_casts),
            "compress": CompressionPlan.of(self.compress),
            "sharding": ShardingPlan.of(self.sharding),
            "repeated_blocks": checks.boolean_or_auto("repeated_blocks", self.repeated_blocks),
            "inductor": checks.mapping("inductor", self.inductor, lambda _key, value: value),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        object.__setattr__(self, "asked", frozenset(n for n, v in checked.items() if v != defaults[n]))
        if self.fa4 and self.attention == "fastest":
            raise BadOptionError("attention", "fastest", "\"default\", as 'fa4' decides without a measurement")
        for name in self.disable:
            if self.passes.get(name):
                raise BadOptionError(f"passes[{name!r}]", True, f"False or no entry, as 'disable' names {name!r} too")

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any] | Config | None, known_passes: Sequence[str],
        environ: Mapping[str, str] | None = None,
    ) -> Config:  # fmt: skip
        """The checked settings from `options` and the environment.

        A variable fills a field only when `options` has no such key, so code wins over the environment; an empty
        variable counts as unset. One that is overruled, and a MEGACPP_ variable of another name, is warned of, once a
        process.

        ================  ==================================================================
        MEGACPP_DISABLE   comma-separated pass names; those that `passes` enables stay enabled
        MEGACPP_VERIFY    off or each
        MEGACPP_STRICT    0, 1, false or true
        MEGACPP_TARGET    auto, cpu, cuda or tpu
        MEGACPP_EXPLAIN   0, 1, false or true
        MEGACPP_SUMMARY   0, 1, false or true
        ================  ==================================================================

        Args:
            options: field name -> value, as given to `torch.compile`; lists may stand for tuples. A field's old name
                is taken with a FutureWarning. A `Config` stands for those of its fields that are not the default.
            known_passes: the name of every pass there is.
            environ: the environment; `os.environ` when None.

        Raises:
            UnknownOptionError: a key that is no field.
            BadOptionError: a value of the wrong type or outside its domain, a setting that Inductor does not have, a
                pass that is both enabled in `passes` and named in `disable`, or an option given by its old and its new
                name.
            UnknownPassError: a name in `disable`, `passes` or `require` that no pass has.
        """
        given = renamed(given_options(options))
        valid = [f.name for f in fields(cls)]
        for key in given:
            if key not in valid:
                raise UnknownOptionError(key, valid, _elsewhere(key, given[key], valid), RENAMED_OPTIONS)
        where = {name: f"option {name!r}" for name in ("disable", "passes", "require")}

        from_environment = environment.read(environ, given, _VARIABLES)
        if "disable" in from_environment:
            where["disable"] = "environment variable MEGACPP_DISABLE"
            _check_known(from_environment["disable"], known_passes, where["disable"])
            enabled = checks.mapping("passes", given.get("passes", {}), checks.boolean)
            for name in from_environment["disable"]:
                if enabled.get(name):
                    warn_once(f"MEGACPP_DISABLE has no effect on {name!r}: the option 'passes' enables it.")
            from_environment["disable"] = [name for name in from_environment["disable"] if not enabled.get(name)]

        config = cls(**given, **from_environment)
        for option in ("disable", "passes", "require"):
            _check_known(getattr(config, option), known_passes, where[option])
        if config.inductor:
            from megacpp_compile.config.inductor_settings import check

            check(config.inductor)
        object.__setattr__(config, "asked", frozenset(given) | frozenset(from_environment))
        return config

    def enabled(self, name: str, default: bool = True) -> bool:
        """Whether the pass `name` is to run; `default` is for a pass that no setting names."""
        return name not in self.disable and self.passes.get(name, default)

    def on(self, target: targets.Target) -> Config:
        """The settings for `target`, with every "auto" but that of `Config.target` itself resolved."""
        return replace(self, keep_latents=target.keeps_latents) if self.keep_latents == "auto" else self

    @property
    def own_policy(self) -> CheckpointingPolicy | None:
        """The policy that the user wrote; None for "auto", which decides frame by frame, and where there is none."""
        return self.policy if isinstance(self.policy, CheckpointingPolicy) else None

    @property
    def auto_time(self) -> float | None:
        """The fraction of a step's predicted time that recomputing may take under "auto"; None under another policy."""
        return self.policy.time if isinstance(self.policy, AutoPolicy) else FREE if self.policy == AUTO else None

    def without_auto(self) -> Config:
        """The settings with None in the place of a policy "auto", which a backend carries out by itself."""
        found = replace(self, policy=self.own_policy)
        object.__setattr__(found, "asked", self.asked)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain containers, fit for `Config(**d)` and `options=d`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}
        objects = {n: getattr(self, n) for n in ("policy", "precision", "compress", "sharding")}
        return plain | {name: v.to_dict() for name, v in objects.items() if v is not None and v != AUTO}

    def cache_key(self) -> str:
        """Text that is equal, also across processes, for settings that compile the same code.

        Every field counts but `explain` and `summary`, which only print, and the code of rules and lowerings that are
        registered. An object under `inductor` counts by its `uuid()` if it has one (as Inductor's `CustomGraphPass`
        does), else by its repr.
        """
        return self._text() + (checks.canonical(registered.CODE) if registered.CODE else "")

    def _text(self) -> str:
        return checks.canonical({name: value for name, value in self.to_dict().items() if name not in _PRINTS})

    # Equality goes by text because `inductor` may hold unhashable values, and because 1 == True there
    # would be an equality that Inductor does not share.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Config):
            return NotImplemented
        printing = all(getattr(self, name) == getattr(other, name) for name in _PRINTS)
        return printing and self._text() == other._text()

    def __hash__(self) -> int:
        return hash(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only mapping views can be neither pickled nor deep-copied.
        return Config, tuple(self.to_dict().values())


def given_options(options: Any) -> dict[str, Any]:
    """`options` as a mapping of their own: those of a `Config` are its fields that the user gave. Raises BadOptionError
    for what is neither None, a mapping nor a `Config`."""
    if isinstance(options, Config):
        return {name: getattr(options, name) for name in sorted(options.asked)}
    if options is not None and not isinstance(options, Mapping):
        raise BadOptionError("options", options, "a mapping from option name to value, or a Config")
    return dict(options or {})


def _elsewhere(key: Any, value: Any, own: Sequence[str]) -> str:
    """Where a key that is none of `own` goes, as a sentence: one of Inductor's, or an argument of torch.compile. "" for
    any other."""
    import torch

    from megacpp_compile.config import inductor_settings

    if not isinstance(key, str):
        return ""
    if key in inspect.signature(torch.compile).parameters and key not in ("model", "backend", "options"):
        call = f"torch.compile(model, backend='megacpp', {key}={value!r})"
        return f"It is an argument of torch.compile itself: {call}."
    return inductor_settings.hint(key, value, own)


def _kind(key: str, value: Any) -> str:
    return checks.choice(key, value, KINDS, _KIND_MEANT)


def _traceable(plan: PrecisionPlan | None) -> PrecisionPlan | None:
    if plan is not None and (untraceable := plan.recipes() & UNTRACEABLE):
        wanted = "recipes that can be traced. In a graph use 'fp8_current', or plan.traceable(), with bf16 instead"
        raise BadOptionError("precision", min(untraceable), wanted)
    return plan


def _check_known(names: Iterable[str], known_passes: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known_passes:
            raise UnknownPassError(name, known_passes, where)


_VARIABLES: environment.Readers = {
    "disable": checks.names,
    "verify": lambda key, text: checks.choice(key, text, get_args(Verify)),
    "strict": checks.boolean_text,
    "target": lambda key, text: checks.choice(key, text, get_args(Target), _TARGET_MEANT),
    "explain": checks.boolean_text,
    "summary": checks.boolean_text,
}
