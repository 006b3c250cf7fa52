"""The engine as a model of the lm-evaluation-harness; needs its package (extra `eval`).

    import lm_eval
    from infinigen_jax.evaluation.lm_eval import InfiniGenLM
    lm_eval.simple_evaluate(model=InfiniGenLM(engine), tasks=["piqa"])

or its own command line. Releases of the harness after 0.4.13 know this model by its entry point:

    lm_eval run --model infinigen-jax --model_args model=DIR,policy=infinigen,budget=0.1 \\
        --tasks piqa

For 0.4.13, `python -m infinigen_jax.evaluation.lm_eval` takes the place of `lm_eval`.

Decode steps make every token that counts, see `answers`. Generation is greedy.
"""

import dataclasses
from typing import Any, NoReturn

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)
from tqdm import tqdm

from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.answers import Continuation, answer, likelihoods
from infinigen_jax.evaluation.scoring import Traffic
from infinigen_jax.evaluation.texts import beginning, prefixed, split_context

MAX_NEW_TOKENS = 256  # unless a task sets it


@register_model("infinigen-jax")
class InfiniGenLM(LM):
    """Model of the lm-evaluation-harness, see the module.

    Args:
        engine: engine to use; None to make one from `options`.
        options: model, policy, budget, ... as the options of `python -m infinigen_jax.generate` of
            those names, and settings of the policy that have no option (a comma would end the
            policy's name); arguments of the harness that do not apply (device) are ignored.

    Attributes:
        traffic: rows and bytes moved by all requests so far.

    Raises:
        InputError: for wrong options.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        batch_size: int | str = 8,
        max_batch_size: Any = None,
        device: Any = None,
        quiet: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.engine = _engine(options, quiet) if engine is None else engine
        self.quiet, self.traffic = quiet, Traffic()
        self.batch = int(batch_size) if str(batch_size).isdigit() else 8
        self.config = self.engine.model.config
        # Texts longer than this rotate keys differently, and cannot begin as shorter ones.
        self.growing = self.config.longest_short or self.config.max_positions
        if self.engine.model.tokenizer is None:
            raise InputError("this model has no tokenizer; convert it with one")
        self._first = beginning(self.engine.model.tokenizer, self.engine.model.config)

    @property
    def tokenizer_name(self) -> str:
        return type(self.engine.model.tokenizer).__name__

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        """Return the natural log-likelihood of each continuation, and whether it is greedy."""
        tokenizer = self.engine.model.tokenizer
        texts = (split_context(tokenizer, *request.args, first=self._first) for request in requests)
        scores = self._score([Continuation(*each) for each in texts], disable_tqdm)
        found = [(float(score), bool(greedy)) for score, greedy in scores]
        return self._cached("loglikelihood", requests, found)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the natural log-likelihood of each text, in windows as long as it grows."""
        asked, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.engine.model.tokenizer.encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(tokens, self._first, self.growing - 1, 1):
                asked.append(Continuation(*make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._score(asked, disable_tqdm), strict=True):
            totals[owner] += float(score)
        return self._cached("loglikelihood_rolling", requests, totals)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy text after each context, up to one of its stop strings."""
        texts = [""] * len(requests)
        settings = [self._settings(request) for request in requests]
        tokenizer = self.engine.model.tokenizer
        hidden = disable_tqdm or self.quiet
        with tqdm(total=len(requests), unit=" texts", disable=hidden) as progress:
            # Requests of one length of answer are one batch.
            for size in sorted({size for _, size in settings}):
                numbers = [i for i, (_, each) in enumerate(settings) if each == size]
                contexts = (prefixed(tokenizer, requests[i].args[0]) for i in numbers)
                prompts = [self._fitting(context, size) for context in contexts]
                prompts = [[self._first] * (2 - len(p)) + p for p in prompts]
                tokens, moved = answer(self.engine, prompts, 1, size, self.batch, progress.update)
                self.traffic += moved
                for i, row in zip(numbers, tokens, strict=True):
                    texts[i] = tokenizer.decode(row[row >= 0].tolist())
        for i, (stops, _) in enumerate(settings):
            for stop in stops:
                texts[i] = texts[i].split(stop)[0]
        return self._cached("generate_until", requests, texts)

    def _cached(self, method: str, requests: list[Any], results: list[Any]) -> list[Any]:
        """Give the results to the harness's cache too."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(method, request.args, result)
        return results

    def _score(self, asked: list[Continuation], disable_tqdm: bool) -> Any:
        with tqdm(total=len(asked), unit=" texts", disable=disable_tqdm or self.quiet) as progress:
            scores, moved = likelihoods(self.engine, asked, self.batch, progress.update)
        self.traffic += moved
        return scores

    def _fitting(self, prompt: list[int], size: int) -> list[int]:
        """Leave out first tokens of a prompt until there is room for an answer of `size`."""
        prompt = prompt[size - self.config.max_positions :]
        # All but the last token are cached before the first step.
        return prompt if size < self.config.room(len(prompt) - 1) else prompt[size - self.growing :]

    def _settings(self, request: Any) -> tuple[list[str], int]:
        """Return a request's stop strings, and the number of tokens to generate."""
        settings = {name: x for name, x in request.args[1].items() if x is not None}
        stops = settings.get("until", [])
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            raise InputError("do_sample: this model generates greedily; set it to false")
        size = min(int(settings.get("max_gen_toks", MAX_NEW_TOKENS)), self.growing // 2)
        stops = [stops] if isinstance(stops, str) else stops
        return [stop for stop in stops if stop], size


def _engine(options: dict[str, Any], quiet: bool) -> Engine:
    from infinigen_jax.cli.options import (
        add_engine_options,
        add_model_options,
        load_engine,
        read_policy,
    )
    from infinigen_jax.errors import Parser
    from infinigen_jax.messages import Messages

    class Arguments(Parser):
        def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
            raise InputError((message or "").removeprefix("error: "))  # not the end of a notebook

    parser = Arguments(prog="--model_args")
    add_model_options(parser.add_argument)
    add_engine_options(parser)
    policy = str(options.get("policy", parser.get_default("policy")))
    settings = {field.name for field in dataclasses.fields(read_policy(policy)[0])}
    behind = settings & options.keys() - vars(parser.parse_args([])).keys()
    for name in sorted(behind):
        value = options[name]
        value = str(value).lower() if isinstance(value, bool) else value
        policy += f"{',' if read_policy(policy)[1] else ':'}{name}={value}"
    options = {n: value for n, value in options.items() if n not in behind} | {"policy": policy}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    arguments = parser.parse_args(given)
    arguments.quiet = quiet
    return load_engine(arguments, Messages(quiet))


def main() -> int:
    """Run the harness's command line with the model `infinigen-jax` registered."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    from infinigen_jax.errors import run_command

    return run_command(cli_evaluate, program=True)


if __name__ == "__main__":
    import sys

    sys.exit(main())
