"""The flags: fields of training arguments, and the options that they set."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Optional

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.saving.replica_policies import CheckReplicas
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.transfer.options import LoadOptions

FLEX = "flex_checkpoint"
# Some trainers leave truth values of the command line as text.
_TRUTH = {**dict.fromkeys(("true", "1"), True), **dict.fromkeys(("false", "0", "none"), False)}
# All but FLEX are the libraries' own.
_FORMATS = (FLEX, "unified_checkpoint", "sharding_io")
_STRICT: dict[str, Any] = {"missing": "missing", "unexpected": "unexpected", "both": True, "none": False}
_VERIFY = ("read", "full", "off")
# Numbers and truth values are accepted too, as for a switch.
_REPLICAS: dict[str, CheckReplicas] = {
    "close": "close",
    **dict.fromkeys(("equal", "1", "true"), "equal"),
    "all": "all",
    **dict.fromkeys(("first", "0", "false"), False),
}
# A trainer of no library counts as one of the first.
LIBRARIES = ("paddlenlp", "paddleformers", "paddlefleet")
# PaddleFormers and PaddleFleet have flags of these names, with their own defaults.
SHARED = ("save_checkpoint_format", "load_checkpoint_format", "aoa_config")
# Flags of the semi-automatic trainer that choose or convert its own format.
_OWN_LAYOUT = (
    "auto_parallel_resume_form_hybrid_parallel",
    "load_model_with_sharding_tensor_fusion",
    "save_model_with_sharding_tensor_fusion",
)


def _flag(default: Any, text: str) -> Any:
    """Return a field whose text is that of ``--help``."""
    return field(default=default, metadata={"help": text})


@dataclass
class FlexTrainingArguments:
    """The fields of the flags, for ``class MyArguments(FlexTrainingArguments, TrainingArguments)``.

    ``install()`` adds them to TrainingArguments itself. Their texts are shown by ``--help``. Argument parsers evaluate
    the types, on Python 3.9 too.
    """

    save_checkpoint_format: Optional[str] = _flag(  # noqa: UP045
        None, "flex_checkpoint: checkpoints that resume under any parallel strategy. Unset: the library's."
    )
    load_checkpoint_format: Optional[str] = _flag(  # noqa: UP045
        None,
        "flex_checkpoint: resume from a flex checkpoint, a unified checkpoint, Paddle's own flex checkpoint or Hugging "
        "Face weights, whatever strategy it was saved under. Unset: the library's.",
    )
    aoa_config: Optional[str] = _flag(  # noqa: UP045
        None,
        "AOA statements applied when a checkpoint is loaded: a JSON list of statements, a JSON object with "
        "aoa_statements, or the path of a JSON or YAML file.",
    )
    flex_async_save: bool = _flag(False, "Write checkpoints in the background; training stops for one copy in memory.")
    flex_slice_bytes: Optional[int] = _flag(  # noqa: UP045
        None,
        "With flex_async_save: bytes to copy after each micro-step of the next step (gradient_accumulation_steps); "
        "the save itself copies small tensors only, and the rest is copied before the optimizer's step.",
    )
    flex_staging_bytes: Optional[int] = _flag(  # noqa: UP045
        None,
        "With flex_async_save: the most memory for the copy, at least 67108864; the save then waits for writes.",
    )
    flex_verify: str = _flag(
        "read", "Checksums on load. read: of all that is used. full: blocks are read whole besides. off: none."
    )
    flex_strict: str = _flag(
        "missing",
        "Errors on load. missing: a tensor that the checkpoint lacks. unexpected: a tensor that only the checkpoint "
        "has. both. none.",
    )
    flex_fallback: bool = _flag(False, "If the checkpoint is damaged or unfinished, resume from the one before it.")
    flex_export_hf: bool = _flag(False, "Write the weights in Hugging Face format too, into huggingface/ beside each.")
    flex_save_replicas: bool = _flag(False, "Write every replica of every shard; a damaged one is replaced by another.")
    flex_check_replicas: str = _flag(
        "close",
        "Replicas that differ between ranks. close: one rank's values are saved, and a warning says by how much they "
        "differ. equal: an error of the save; all: likewise, with every copy compared in full. "
        "first: one rank's values are saved without comparing.",
    )
    flex_cast: bool = _flag(False, "Convert tensors whose dtype is another than the checkpoint's; else an error.")
    flex_convert_master_weights: bool = _flag(
        False, "Make master weights that the checkpoint lacks from its parameters, and parameters from master weights."
    )
    flex_ignore_optimizer_states: bool = _flag(
        False, "Load without the optimizer states that only the checkpoint has; else they are an error."
    )
    flex_ignore_schedule: bool = _flag(
        False,
        "Start the learning rate's schedule or the scaler anew where the checkpoint's does not fit; else an error.",
    )
    flex_data_position: bool = _flag(
        False,
        "Save the position in the data with each checkpoint, and continue with the next sample under any number of "
        "processes. All samples of a seed have one order, which is not that of the trainer's own sampler.",
    )


_SWITCHES = [each.name[len("flex_") :] for each in fields(FlexTrainingArguments) if each.default is False]


@dataclass(frozen=True)
class TrainerOptions:
    """The options that the flags set.

    Attributes:
        save: Whether checkpoints are saved by this library.
        load: Whether they are loaded by it.
        aoa_config: As of :func:`load_state_dict`.
        async_save: Whether saves are written in the background.
        slice_bytes: As of :func:`save_state_dict`; so is ``staging_bytes``.
        verify: As of :func:`load_state_dict`; so is ``strict``.
        fallback: Whether to resume from an older checkpoint if one is damaged or not complete.
        export_hf: Whether weights are exported after each save.
        save_replicas: As of :func:`save_state_dict`.
        check_replicas: Likewise. The default is ``"close"``: ranks that drift apart by rounding do not end a training.
        cast: Whether dtypes may differ on load.
        convert_master_weights: Whether masters and parameters may replace each other.
        ignore_optimizer_states: Whether optimizer states that only the checkpoint has are left out.
        ignore_schedule: Whether a schedule, scaler or position of the checkpoint that does not fit is left out.
        data_position: Whether the position in the data is saved and restored.
        load_transform: As of :func:`load_state_dict`, for loads of quantized weights; no flag sets it.
    """

    save: bool = False
    load: bool = False
    aoa_config: str | Mapping[str, Any] | None = None
    async_save: bool = False
    slice_bytes: int | None = None
    staging_bytes: int | None = None
    verify: VerifyMode = "read"
    strict: bool | Literal["missing", "unexpected"] = "missing"
    fallback: bool = False
    export_hf: bool = False
    save_replicas: bool = False
    check_replicas: CheckReplicas = "close"
    cast: bool = False
    convert_master_weights: bool = False
    ignore_optimizer_states: bool = False
    ignore_schedule: bool = False
    data_position: bool = False
    load_transform: Any = None

    def staging(self) -> dict[str, Any]:
        """Return the options of :func:`save_state_dict` for staging."""
        return {name: getattr(self, name) for name in ("async_save", "slice_bytes", "staging_bytes")}

    def loading(self) -> LoadOptions:
        """Return the options of :func:`load_state_dict`."""
        return LoadOptions(
            aoa_config=self.aoa_config,
            strict=self.strict,
            verify=self.verify,
            dtype="cast" if self.cast else "raise",
            master_weights="convert" if self.convert_master_weights else "exact",
            optimizer_states="ignore" if self.ignore_optimizer_states else "raise",
            load_transform=self.load_transform,
        )


def options_of(args: Any) -> TrainerOptions:
    """Return the options in training arguments; those without the fields have none of them set.

    Raises:
        ValidationError: A flag has a value that it cannot have, or contradicts another.
    """
    save = getattr(args, "save_checkpoint_format", None) == FLEX
    load = getattr(args, "load_checkpoint_format", None) == FLEX
    problems = _unknown_values(args)
    verify: Any = getattr(args, "flex_verify", "read")
    strict = getattr(args, "flex_strict", "missing")
    replicas = str(getattr(args, "flex_check_replicas", "close"))
    if verify not in _VERIFY:
        problems.append(f"--flex_verify has to be one of {', '.join(_VERIFY)}; got {verify!r}")
    if strict not in _STRICT:
        problems.append(f"--flex_strict has to be one of {', '.join(_STRICT)}; got {strict!r}")
    if replicas.lower() not in _REPLICAS:
        problems.append(f"--flex_check_replicas has to be one of close, equal, all, first; got {replicas!r}")
    if save or load:
        problems += _contradictions(args, save, load)
    config: Any = None
    try:
        config = _statements_of_flag(getattr(args, "aoa_config", None))
    except ValueError as error:
        problems.append(str(error))
    switches = {name: _TRUTH.get(str(getattr(args, f"flex_{name}", False)).lower(), False) for name in _SWITCHES}
    # PaddleFormers' and PaddleFleet's own names of these flags.
    switches["save_replicas"] |= bool(getattr(args, "replicate_saved_into_local", False))
    switches["async_save"] |= save and bool(getattr(args, "use_flex_async_save", False))
    if switches["data_position"]:
        problems += _contradictions_of_position(args, save or load)
    sizes: dict[str, Any] = {name: getattr(args, f"flex_{name}", None) for name in ("slice_bytes", "staging_bytes")}
    try:
        SaveOptions(async_save=switches["async_save"], **sizes).check()
    except ValidationError as error:
        problems.append(f"--flex_async_save {int(switches['async_save'])}: {error}")
    if problems:
        raise ValidationError(problems, "training arguments")
    return TrainerOptions(
        save=save,
        load=load,
        aoa_config=config,
        verify=verify,
        strict=_STRICT[strict],
        check_replicas=_REPLICAS[replicas.lower()],
        **switches,
        **sizes,
    )


def _unknown_values(args: Any) -> list[str]:
    """Return the problems of formats and switches with an unknown value."""
    problems = []
    for name in ("save_checkpoint_format", "load_checkpoint_format"):
        value = getattr(args, name, None)
        if value not in (None, "", *_FORMATS):
            near = difflib.get_close_matches(str(value).lower(), _FORMATS, 1, 0.3) or [FLEX]
            known = ", ".join(_FORMATS)
            problems.append(
                f"--{name} is one of {known}, or unset; got {value!r}. Remedy (FC905): --{name} {near[0]}, if it is "
                "meant"
            )
    for name in _SWITCHES:
        value = getattr(args, f"flex_{name}", False)
        if str(value).lower() not in _TRUTH:
            problems.append(f"--flex_{name} is True or False; got {value!r}")
    return problems


def _contradictions(args: Any, save: bool, load: bool) -> list[str]:
    """Return a problem for each flag of the library's own formats that excludes these flags."""

    def given(name: str) -> bool:
        return bool(getattr(args, name, False))

    flag = f"--{'save' if save else 'load'}_checkpoint_format {FLEX}"
    # PaddleFormers sets its own flag from the format.
    unified = given("unified_checkpoint") and getattr(args, "save_checkpoint_format", None) != "unified_checkpoint"
    output = str(getattr(args, "output_dir", ""))
    rules = [
        (
            output.startswith("~"),
            f"--output_dir {output}: the trainer makes a directory that is called {output.partition('/')[0]}. "
            f"Remedy (FC905): give the path in full, {os.path.expanduser(output)}",
        ),
        (
            unified,
            f"{flag} and --unified_checkpoint are two formats. Remedy (FC905): leave --unified_checkpoint out; a "
            f"unified checkpoint loads with --load_checkpoint_format {FLEX}",
        ),
        *(
            (asked and given(name), f"{flag} and --{name} are two formats. Remedy (FC905): leave --{name} out")
            for asked, name in ((save, "save_sharded_model"), (load, "load_sharded_model"))
        ),
        (
            save and given("use_async_save"),
            f"{flag} has an asynchronous save of its own. Remedy (FC905): --flex_async_save, not --use_async_save",
        ),
        (
            given("enable_zero_cost_checkpoint"),
            f"{flag} and --enable_zero_cost_checkpoint are two ways of saving in the background. Remedy (FC905): "
            "--flex_async_save, not --enable_zero_cost_checkpoint",
        ),
        (
            load and given("sharded_model_from_ema"),
            f"{flag} does not start a model from moving averages (--sharded_model_from_ema)",
        ),
        (
            load and given("load_from_hf") and not given("ignore_load_lr_and_optim"),
            "--load_from_hf has no optimizer to load. Remedy (FC905): give --ignore_load_lr_and_optim as well",
        ),
    ]
    if library_of(args) == "paddlefleet":
        rules += _contradictions_of_paddlefleet(args, save, load)
    if given("enable_auto_parallel"):
        rules += _contradictions_of_semi_auto(args, flag)
    return [text for wrong, text in rules if wrong]


def _contradictions_of_position(args: Any, is_ours: bool) -> list[str]:
    """Return the problems of ``--flex_data_position`` with these arguments."""
    found = [
        f"--flex_data_position and --{name} are two ways of dealing out the samples. Remedy (FC905): leave one of the "
        "two out"
        for name in ("enable_auto_parallel", "distributed_dataloader")
        if getattr(args, name, False)
    ]
    nowhere = (
        f"--flex_data_position: no checkpoint has a position. Remedy (FC905): give --save_checkpoint_format {FLEX} and "
        f"--load_checkpoint_format {FLEX} as well"
    )
    return found if is_ours else [nowhere, *found]


def _contradictions_of_semi_auto(args: Any, flag: str) -> list[tuple[bool, str]]:
    """Return what the semi-automatic trainer does not support, and whether the arguments ask for it."""
    if library_of(args) != "paddlenlp":
        name = "PaddleFleet's" if library_of(args) == "paddlefleet" else "PaddleFormers'"
        return [(True, f"{flag} does not serve {name} semi-automatic trainer (--enable_auto_parallel)")]
    remedy = f"is of the trainer's own format; {flag} has one for all. Remedy (FC905): leave it out"
    return [
        (
            bool(getattr(args, "flex_fallback", False)),
            "--flex_fallback: the semi-automatic trainer (--enable_auto_parallel) reads its step before the "
            "tensors, and cannot go back to another. Remedy (FC905): leave it out; where a checkpoint is damaged, the "
            "error names it, and --resume_from_checkpoint can name the one before it",
        ),
        (
            getattr(args, "flex_slice_bytes", None) is not None,
            "--flex_slice_bytes: the semi-automatic trainer (--enable_auto_parallel) may step in a static graph, "
            "where nothing can be copied before. Remedy (FC905): leave it out",
        ),
        *((bool(getattr(args, name, False)), f"--{name} {remedy}") for name in _OWN_LAYOUT),
    ]


def _contradictions_of_paddlefleet(args: Any, save: bool, load: bool) -> list[tuple[bool, str]]:
    """Return the features of PaddleFleet that are not supported, and whether the arguments ask for them."""
    one = (
        "one program is for model, masters and states. Remedy (FC905): give --aoa_config with the statements of "
        "parameters"
    )
    rules = [
        (
            save and getattr(args, "zcc_save_ema_coef", None) is not None and (_number(args, "save_hf_steps") or 0) > 0,
            "--zcc_save_ema_coef with --save_hf_steps: PaddleFleet makes its Hugging Face export of moving averages of "
            "files that are not written here. Remedy (FC905): leave --save_hf_steps out; the averages are in the "
            "checkpoint",
        ),
        (
            load and bool(getattr(args, "pdc_download_ckpt", False)),
            "--pdc_download_ckpt brings the checkpoint when it has been chosen already. Remedy (FC905): download it "
            "first",
        ),
    ]
    for name in ("aoa_config_master_weight", "aoa_config_model_state"):
        rules.append((load and getattr(args, name, None) is not None, f"{name}: {one}"))
    for name in ("HACK_CONVERT_CKPT", "HACK_CONVERT_CKPT_NOPP_TO_PP"):
        asked = os.environ.get(name, "").lower() in ("1", "true")
        rules.append((load and asked, f"{name}={os.environ.get(name)} of the environment: {one}"))
    return rules


def _number(args: Any, name: str) -> int | None:
    value = getattr(args, name, None)
    return value if isinstance(value, int) else None


def library_of(thing: Any) -> str:
    """Return the library of a trainer or its arguments: that of the first of its classes that is from one."""
    for cls in type(thing).__mro__:
        package = cls.__module__.partition(".")[0]
        if package in LIBRARIES:
            return package
    return LIBRARIES[0]


def _statements_of_flag(value: Any) -> Any:
    """Return statements in the form of :func:`load_state_dict`: a list becomes a config, all else stays."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith("["):
            return value
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"--aoa_config is no JSON: {error}") from error
    if isinstance(value, (list, tuple)):
        return {"aoa_statements": [str(statement) for statement in value]}
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"--aoa_config has to be statements or the path of a file; got a {type(value).__name__}")
