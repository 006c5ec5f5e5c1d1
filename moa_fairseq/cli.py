"""`moa-fairseq VERB`: imports and runs the module of a verb, and prints errors for users."""

import argparse
import contextlib
import functools
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import moa_fairseq
from moa_fairseq.errors import UserError, did_you_mean, printable
from moa_fairseq.experiments.tables import Terminal
from moa_fairseq.files.utf8 import use_utf8

DESCRIPTION = """Train and evaluate mixtures of attention heads (MoA, MAE, SwitchHead, MoH) with fairseq.

A recipe of configs/ runs from the data to the paper's score; `moa-fairseq VERB --help` explains each verb."""

# verb → (module of `experiments` with add_arguments(parser) and run(args) -> int, one line of help)
VERBS = {
    "recipe": ("recipes.command", "run one experiment of configs/ from data to score"),
    "prepare": ("data.command", "prepare one data set: download, tokenise, BPE, binarise"),
    "average": ("scoring.average", "average checkpoints into one"),
    "convert": ("convert.command", "turn a Transformer into a mixture of heads, or back"),
    "score": ("scoring.score", "BLEU of translations, perplexity of a masked language model"),
    "translate": ("inference.translate", "translate raw text with a trained run"),
    "complete": ("inference.complete", "let a trained language model go on with a text"),
    "fill-mask": ("scoring.fill_mask", "let a masked language model fill a gap"),
    "export": ("inference.export", "a trained run as a small folder to give away"),
    "zero-shot": (
        "inference.zero_shot",
        "accuracy of a language model on tasks of lm-evaluation-harness",
    ),
    "complexity": ("scoring.complexity", "parameters and MACs of an architecture"),
    "compare": ("scoring.compare", "the papers' numbers beside the measured ones"),
    "analyze": (
        "analysis.command",
        "learning curves, expert load, and what gates and experts of a trained model do",
    ),
    "look": (
        "look.command",
        "one page of a trained run: which expert took which word, loads, training, result",
    ),
    "study": ("study.command", "systems × seeds: train them, and judge their differences"),
    "corpus": ("corpus.command", "build the embedded English-German corpus"),
}
TEXT_VERBS = ("translate", "complete", "fill-mask")  # their standard output is their text alone


class Console(logging.Handler):
    """Writes log messages as plain lines; a warning begins with its level.

    Args:
        write: called with each message, without a line end; control characters are written as escapes.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self.write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write the message at once. The caller handles errors, such as that of a closed pipe."""
        level = ""
        if record.levelno >= logging.WARNING:
            level = f"{record.levelname}: "
        self.write(printable(level + record.getMessage()))


@contextlib.contextmanager
def reporting_to(handler: logging.Handler) -> Iterator[None]:
    """Inside the block, log messages of the experiments go to `handler` alone.

    Args:
        handler: gets all messages of level INFO and above; after the block the logger is as before.
    """
    logger = logging.getLogger("moa_fairseq.experiments")
    handlers = logger.handlers
    propagate = logger.propagate
    level = logger.level
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers = handlers
        logger.propagate = propagate
        logger.setLevel(level)


class _Parser(argparse.ArgumentParser):
    """A parser that suggests names for a mistyped verb, flag or choice."""

    def error(self, message: str) -> NoReturn:
        """argparse's error, with the nearest names in its message."""
        if choice := re.search(r"invalid choice: '(.+?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        elif message.startswith("unrecognized arguments: "):
            words = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
            message += "".join(did_you_mean(word, [*_flags_of(self)]) for word in words)
        super().error(message)


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """All flags of a parser, including those of its verbs."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _flags_of(verb)


class _VerbParser(_Parser):
    """The parser of one verb.

    Attributes:
        any_order: whether positional arguments may stand between and after the flags.
    """

    any_order = False

    def parse_known_args(self, args=None, namespace=None):
        """argparse's method; with `any_order`, argparse alone would fill an optional argument too early."""
        if not self.any_order:
            return super().parse_known_args(args, namespace)
        self.any_order = False  # parse_known_intermixed_args calls this method again
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.any_order = True


def build_parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of `moa-fairseq`; only the verb named in `argv` has its module imported.

    Args:
        argv: the words after the program's name.

    Raises:
        ImportError: if the verb's module needs a library that is not installed.
    """
    parser = _Parser(prog="moa-fairseq", description=DESCRIPTION)
    parser.add_argument(
        "--user-dir",
        metavar="DIR",
        help="a fairseq plugin of your own, for architectures that it registers",
    )
    words = argv[2:] if argv[:1] == ["--user-dir"] else argv
    verb_name = next((word for word in words if not word.startswith("-")), None)
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=_VerbParser
    )
    for verb, (module_name, summary) in VERBS.items():
        subparser = verbs.add_parser(verb, help=summary)
        if verb == verb_name:
            moa_fairseq.register()
            module = importlib.import_module(f"moa_fairseq.experiments.{module_name}")
            subparser.description = module.__doc__
            subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(subparser)
            subparser.any_order = getattr(module, "ANY_ORDER", False)
            subparser.set_defaults(run=module.run)
    return parser


def _import_plugin(args: argparse.Namespace) -> None:
    from fairseq.utils import import_user_module

    if not Path(args.user_dir).is_dir():
        raise UserError(
            f"--user-dir {args.user_dir} is not a folder: give the one that holds the plugin's __init__.py."
        )
    import_user_module(args)


def _refuse_other_encodings(words: list[str]) -> None:
    """Refuse names that are not UTF-8: names of files are written to JSON, YAML and scripts, which are."""
    for word in (*words, os.getcwd()):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{word}: a name that is not UTF-8 cannot be recorded. Rename it."
            ) from error


def _give_up_output() -> None:
    """Discard unwritten output. When Python ends, it would try to write it, fail, and change the status."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # the reader of a pipe has ended, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: the words after the program's name. None stands for the words of this process, whose children
            then import nothing from the working directory.

    Returns:
        The exit status: the verb's own, usually 0; 2 for an error that the user can put right (a UserError,
            an error of a file, a missing library); 3 for a training that diverged; 130 for Ctrl-C; 141 for a
            closed pipe.

    Raises:
        SystemExit: from argparse, for --help and for wrong flags.
    """
    if argv is None:  # this is the program itself
        use_utf8()
        os.environ["PYTHONSAFEPATH"] = "1"
        argv = sys.argv[1:]
    if sys.stderr is None:  # `2>&-`: a message must not land in the standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        args = build_parser(argv).parse_args(argv)
    except ImportError as error:  # the layers need torch alone, the commands need more
        remedy = "bash scripts/setup.sh, or pip install '.[recipes,fairseq]' in the repository"
        reason = str(error).rstrip(".")
        return _fail("moa-fairseq", f"error: {reason}. To install what it needs: {remedy}.", 2)
    program = f"moa-fairseq {args.verb}"
    try:
        return _run(args, argv)
    except UserError as error:  # the errors of all verbs are printed here
        return _fail(program, f"error: {error}", error.status)
    except BrokenPipeError:
        _give_up_output()
        return 141
    except OSError as error:  # of a file, whose name the error has, or of the output
        _give_up_output()
        source = error.filename or "a standard stream or a file"
        return _fail(program, f"error: {source}: {error.strerror or error}.", 2)
    except KeyboardInterrupt:
        return _fail(program, "interrupted; run the same command again to go on", 130)


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    """Run the verb of `args`, which were parsed from `argv`, and return its exit status."""
    logging.getLogger().setLevel(logging.WARNING)  # fairseq has set the level to DEBUG
    # torch warns of fairseq's calls, which a user cannot change.
    warnings.filterwarnings("ignore", message=".*(pin_memory|mismatched key_padding_mask)")
    _refuse_other_encodings(argv)
    if args.user_dir is not None:
        _import_plugin(args)
    # With --json the standard output holds the JSON alone.
    is_output_reserved = getattr(args, "json", None) is True or args.verb in TEXT_VERBS
    log = sys.stderr if is_output_reserved else sys.stdout
    output: contextlib.AbstractContextManager = contextlib.nullcontext()
    if sys.stdout is not None and sys.stdout.isatty():
        output = contextlib.redirect_stdout(Terminal(sys.stdout))
    with output, reporting_to(Console(functools.partial(print, file=log, flush=True))):
        status: int = args.run(args)
    if sys.stdout is not None:
        sys.stdout.flush()
    return status


def _fail(program: str, message: str, status: int) -> int:
    print(printable(f"{program}: {message}"), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
