"""The `attn-bounds` command.

Options and help only: what the commands do is in `commands.py`, which is imported when one runs, for torch
and the rest take seconds that `--help` need not.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .errors import InputError

STARTED = time.monotonic()  # of the process, nearly

# typer's usage errors: click's own class, or the one of the click inside newer typers
ClickException: Any = typer.BadParameter.__mro__[2]


class _Group(TyperGroup):
    """Turns what a user can cause into one line on stderr and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        standalone = kwargs.get("standalone_mode", True)
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except ClickException as e:
            code = _complain(e.format_message())
        except InputError as e:
            code = _complain(str(e))
        except ImportError as e:
            print(f"attn-bounds: {e}", file=sys.stderr)
            code = 2
        except (typer.Abort, KeyboardInterrupt):
            code = 130
        if standalone:
            sys.exit(code or 0)
        return code


def _complain(message: str) -> int:
    if message:  # there is none when the command alone was called, which shows the help
        print(f"attn-bounds: {' '.join(message.split())}", file=sys.stderr)
    return 2


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if not wanted:
        return
    import torch

    from . import lirpa

    try:
        found = lirpa.version()
    except ImportError:
        found = "not installed"
    print(f"attn-bounds {__version__}, auto_LiRPA {found}, torch {torch.__version__}")
    raise typer.Exit()


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Certified bounds for transformers given as ONNX files."""


# ---------------------------------------------------------------------------------------------------------
# options that several commands take

_IN, _SET, _BOUND, _FALSIFY, _LIMIT = "Inputs", "Input set", "Bounds", "Attack", "Limits"
_MANY = "Many inputs"
_EPS = "Radius of the ball, in the units of the inputs."

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="ONNX file.")]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="F.npz", rich_help_panel=_IN, help="Arrays x (N, *input) and integer labels y (N,)."
    ),
]
Index = Annotated[
    list[int] | None,
    typer.Option(metavar="I", rich_help_panel=_IN, help="Only this input of --data (repeatable)."),
]
Count = Annotated[
    int | None, typer.Option(rich_help_panel=_IN, help="Only the first N inputs of --data.", metavar="N")
]
Vnnlib = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="F", rich_help_panel=_IN, help="VNN-LIB property (1.0 or 2.0), .gz or not (repeatable)."
    ),
]
Shape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N",
        rich_help_panel=_IN,
        help="Size of a dynamic dimension besides the batch, like sequence=16, or of an input, like "
        "tokens=1x16 (repeatable).",
    ),
]
Fix = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        rich_help_panel=_IN,
        help="Value of an input that bounds are not over: ones, zeros, positions, a number or a .npy file "
        "(repeatable). What is usual for attention_mask, token_type_ids and position_ids is the default.",
    ),
]
InputNode = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_IN,
        help="Value or node inside the model where bounds start (default: the float input; behind the "
        "embedding of an integer input, integers in --data are embedded first).",
    ),
]
Norm = Annotated[
    str | None,
    typer.Option(
        metavar="1|2|inf", rich_help_panel=_SET, help="Norm of the ball around each input (default: inf)."
    ),
]
Clip = Annotated[
    tuple[float, float] | None,
    typer.Option(metavar="LO HI", rich_help_panel=_SET, help="Valid range of an input entry; cuts the ball."),
]
Mean = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,C",
        rich_help_panel=_SET,
        help="Per channel: what the inputs were normalised with. Then --eps and --clip are in pixel units.",
    ),
]
Std = Annotated[str | None, typer.Option(metavar="A,B,C", rich_help_panel=_SET, help="As --mean.")]
Target = Annotated[
    list[int] | None,
    typer.Option(metavar="C", rich_help_panel=_SET, help="Certify against this class only (repeatable)."),
]
TopK = Annotated[
    int,
    typer.Option(
        metavar="K", min=1, rich_help_panel=_SET, help="The label must stay among the K largest outputs."
    ),
]
Method = Annotated[
    str,
    typer.Option(
        metavar="M",
        rich_help_panel=_BOUND,
        help="ibp, sensitivity, sensitivity-crown, sensitivity-alpha, crown, alpha-crown (ours); stock-ibp, "
        "stock-crown, stock-alpha-crown (auto_LiRPA's own); lofast, lofast-paper (norms, l2); "
        "auto: ours, cheap to tight, until one suffices.",
    ),
]
Dtype = Annotated[
    str, typer.Option(metavar="float32|float64", rich_help_panel=_BOUND, help="Of bounds and attack.")
]
Device = Annotated[
    str, typer.Option(rich_help_panel=_BOUND, metavar="DEVICE", help="torch device: cpu, cuda, …")
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", rich_help_panel=_BOUND, help="CPU threads of torch (default: torch's choice)."
    ),
]
Attack = Annotated[
    bool, typer.Option("--attack/--no-attack", rich_help_panel=_FALSIFY, help="Look for counterexamples.")
]
Restarts = Annotated[
    int, typer.Option(min=1, rich_help_panel=_FALSIFY, metavar="N", help="Starting points of the attack.")
]
Steps = Annotated[
    int, typer.Option(min=0, rich_help_panel=_FALSIFY, metavar="N", help="Gradient steps of the attack.")
]
Seed = Annotated[
    int, typer.Option(rich_help_panel=_FALSIFY, metavar="N", help="Of the attack's random starts.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        rich_help_panel=_LIMIT,
        help="Per input (and method); loading the model is not counted. Then the input is unknown.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="4GB", rich_help_panel=_LIMIT, help="Of the process that computes (torch alone: about 400MB)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout, and nothing else.")]


# ---------------------------------------------------------------------------------------------------------
# commands


@app.command()
def inspect(
    model: Model,
    shape: Shape = None,
    fix: Fix = None,
    input_node: InputNode = None,
    as_json: Json = False,
) -> None:
    """Show shapes, recognised attention, and every node that is not supported.

    [bold]Example[/bold]

    attn-bounds inspect digits_vit.onnx
    """
    from . import commands

    commands.inspect(model, as_json, shape, fix, input_node)


@app.command()
def certify(
    model: Model,
    data: Data = None,
    index: Index = None,
    count: Count = None,
    vnnlib: Vnnlib = None,
    shape: Shape = None,
    fix: Fix = None,
    input_node: InputNode = None,
    norm: Norm = None,
    eps: Annotated[float | None, typer.Option(metavar="E", rich_help_panel=_SET, help=_EPS)] = None,
    clip: Clip = None,
    mean: Mean = None,
    std: Std = None,
    target: Target = None,
    top_k: TopK = 1,
    method: Method = "auto",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    batch: Annotated[
        int,
        typer.Option(min=1, metavar="B", rich_help_panel=_BOUND, help="Inputs of --data bounded at once."),
    ] = 1,
    attack: Attack = True,
    restarts: Restarts = 10,
    steps: Steps = 50,
    seed: Seed = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", rich_help_panel=_MANY, help="Inputs certified at once, each in a process."
        ),
    ] = 1,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="F.jsonl",
            rich_help_panel=_MANY,
            help="Append each result there as it comes; what the file has is not computed again.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            rich_help_panel=_MANY,
            help="Of a dask scheduler: certify on its workers (extra `cluster`).",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Certify that no input in a ball changes class, or that VNN-LIB properties hold.

    With --vnnlib alone each property is checked as it is. With --eps too,
    its box is replaced by the ball around its centre.

    Exit code: 0 everything verified, 1 something not, 2 bad input.

    [bold]Examples[/bold]

    attn-bounds certify digits_vit.onnx --data digits_test.npz --count 20 --norm 2 --eps 0.3

    attn-bounds certify vit.onnx --vnnlib prop.vnnlib.gz --timeout 100 --json

    attn-bounds certify vit.onnx --data test.npz --eps 0.01 --jobs 8 --save results.jsonl
    """
    options = locals()
    from . import commands

    raise typer.Exit(commands.certify(**options))


@app.command()
def verify(
    model: Model,
    vnnlib: Annotated[
        Path,
        typer.Option(metavar="F", rich_help_panel=_IN, help="VNN-LIB property (1.0 or 2.0), .gz or not."),
    ],
    shape: Shape = None,
    fix: Fix = None,
    input_node: InputNode = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", rich_help_panel=_LIMIT, help="For everything, start-up and loading included."
        ),
    ] = None,
    memory: Memory = None,
    results_file: Annotated[
        Path | None,
        typer.Option(metavar="R", help="Write the verdict and a witness there, in the form of VNN-COMP."),
    ] = None,
    method: Method = "auto",
    dtype: Dtype = "float32",
    threads: Threads = None,
    attack: Attack = True,
    restarts: Restarts = 10,
    steps: Steps = 50,
    seed: Seed = 0,
    boundary: Annotated[
        bool,
        typer.Option(
            "--boundary",
            rich_help_panel=_FALSIFY,
            help="Take a witness at which constraints that are not strict hold with equality; without it one "
            "must satisfy all of them strictly.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Decide one VNN-LIB property: sat with a witness, unsat, or unknown.

    The attack first, then bounds from cheap to tight, then parts of the input
    set while there is time (few inputs). A witness is replayed in onnxruntime.
    With --json: property, status (unsat, sat, unknown, timeout, error), margin,
    method, seconds, witness, reason, tried.

    Exit code: 0 any verdict, 1 internal error, 2 bad input, 143 after SIGTERM.

    [bold]Example[/bold]

    attn-bounds verify vit.onnx --vnnlib prop.vnnlib.gz --timeout 100 --results-file result.txt
    """
    options = {**locals(), "started": STARTED}
    from .search import watch

    raise typer.Exit(watch.run(**options))


@app.command()
def radius(
    model: Model,
    data: Data = None,
    index: Index = None,
    count: Count = None,
    vnnlib: Vnnlib = None,
    shape: Shape = None,
    fix: Fix = None,
    input_node: InputNode = None,
    norm: Norm = None,
    clip: Clip = None,
    mean: Mean = None,
    std: Std = None,
    target: Target = None,
    top_k: TopK = 1,
    tol: Annotated[
        float, typer.Option(metavar="T", rich_help_panel=_SET, help="Relative accuracy of the bisection.")
    ] = 0.01,
    upper: Annotated[
        float | None,
        typer.Option(
            metavar="R", rich_help_panel=_SET, help="Largest radius tried (default: norm of the input)."
        ),
    ] = None,
    method: Method = "auto",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    attack: Attack = True,
    restarts: Restarts = 10,
    steps: Steps = 50,
    seed: Seed = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Largest radius that can be certified, and the smallest at which the attack succeeds.

    The true robust radius lies between the two.

    [bold]Example[/bold]

    attn-bounds radius digits_vit.onnx --data digits_test.npz --count 5 --norm 2 --method crown
    """
    options = locals()
    from . import commands

    commands.radius(**options)


@app.command()
def compare(
    model: Model,
    data: Data = None,
    index: Index = None,
    count: Count = None,
    vnnlib: Vnnlib = None,
    shape: Shape = None,
    fix: Fix = None,
    input_node: InputNode = None,
    norm: Norm = None,
    eps: Annotated[
        list[float] | None,
        typer.Option(metavar="E", rich_help_panel=_SET, help=f"{_EPS} Repeatable."),
    ] = None,
    clip: Clip = None,
    mean: Mean = None,
    std: Std = None,
    target: Target = None,
    top_k: TopK = 1,
    methods: Annotated[
        str,
        typer.Option(metavar="M,M,…", rich_help_panel=_BOUND, help="Methods as in certify, with commas."),
    ] = "ibp,sensitivity,crown,alpha-crown,stock-ibp,stock-crown",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    attack: Attack = True,
    restarts: Restarts = 10,
    steps: Steps = 50,
    seed: Seed = 0,
    timeout: Timeout = None,
    memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Bounds of several methods on the same inputs: margins, certified inputs, seconds.

    The attack runs once per input and eps; every method then computes its bound, from scratch.

    [bold]Example[/bold]

    attn-bounds compare digits_vit.onnx --data digits_test.npz --count 10 --norm 2 --eps 0.1 --eps 0.3
    """
    options = locals()
    from . import commands

    commands.compare(**options)


@app.command()
def explain(
    model: Model,
    data: Data = None,
    index: Index = None,
    count: Count = None,
    vnnlib: Vnnlib = None,
    shape: Shape = None,
    fix: Fix = None,
    input_node: InputNode = None,
    norm: Norm = None,
    eps: Annotated[float | None, typer.Option(metavar="E", rich_help_panel=_SET, help=_EPS)] = None,
    clip: Clip = None,
    mean: Mean = None,
    std: Std = None,
    target: Target = None,
    top_k: TopK = 1,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="4GB", rich_help_panel=_LIMIT, help="What the pass may plan for; its cost is shown."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="F.png", help="Also draw it (extra `plot`).")] = None,
    as_json: Json = False,
) -> None:
    """Which layer takes how much of the certified margin.

    Method sensitivity keeps one error set per layer: the input (the linear part,
    exact), the second-order remainder of each attention and normalisation, the
    relaxation of each activation. This prints what each takes from the margin that decides.

    [bold]Example[/bold]

    attn-bounds explain digits_vit.onnx --data digits_test.npz --count 5 --norm 2 --eps 0.2
    """
    options = locals()
    from . import commands

    commands.explain(**options)


@app.command()
def export(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:FACTORY",
            help="SCRIPT.py or package.module, and a function in it that takes no arguments and returns a "
            "torch module, or (module, example).",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="File to write; an old one is replaced.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,C",
            help="Shape of one input without the batch, where FACTORY returns no example (one per input).",
        ),
    ] = None,
    opset: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Version of the operators (default: 18; op23: 23).")
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            metavar="decomposed|op23",
            help="Attention as products and a Softmax, or as the standard operator Attention.",
        ),
    ] = "decomposed",
    exporter: Annotated[
        str,
        typer.Option(
            metavar="auto|dynamo|torchscript",
            help="torch's exporter: dynamo (opset 18 and later), torchscript (9 to 20); auto tries both.",
        ),
    ] = "auto",
    dynamic_batch: Annotated[
        bool, typer.Option("--dynamic-batch/--fixed-batch", help="Any number of samples, or the example's.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Write a torch module as an ONNX file, compared with it in onnxruntime.

    Attention may be torch's own (nn.MultiheadAttention, scaled_dot_product_attention,
    nn.TransformerEncoder) or written out. Nothing is written unless onnxruntime agrees
    with the module to 1e-5; then it says whether the file can be certified.

    Exit code: 0 written, 2 not.

    [bold]Examples[/bold]

    attn-bounds export model.py:make vit.onnx --shape 3,32,32

    attn-bounds export my.package.models:tiny_bert bert.onnx --attention op23 --json
    """
    options = locals()
    from . import commands

    commands.export(**options)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
