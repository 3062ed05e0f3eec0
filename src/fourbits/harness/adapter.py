"""Our models with the interface of lm-evaluation-harness. Imported late: the package is the extra `eval`."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fourbits.generate.sampling import Sampling
from fourbits.harness.scoring import Passage, Report
from fourbits.harness.text_model import TextModel

#: the kinds of the harness' requests, as text
SCORING, ROLLING, ANSWERING = "choices scored", "texts scored", "answers written"
_SAMPLING = ("temperature", "top_k", "top_p", "do_sample")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")


class Ranks(Protocol):
    """The processes that share an evaluation."""

    rank: int
    world: int

    def gathered(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        ...


class HarnessModel(TemplateLM):
    """A TextModel for the harness: log-likelihoods, rolling log-likelihoods and answers.

    ranks: the processes that share the work; None: this one alone. The harness makes all requests to each of
    every rank, and each answers its part, because the harness' own division fails for a task with fewer
    documents than processes. report: receives progress. cut_prompts: number of truncated prompts, for the
    results.
    """

    def __init__(self, text: TextModel, report: Report | None = None, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.text, self.report, self.ranks = text, report, ranks
        self.cut_prompts = 0
        self._device = text.model.embed.weight.device

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.text.tokenizer.end_id

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text."""
        return self.text.prefix[-1] if self.text.prefix else self.eot_token_id

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is the most likely one."""
        return self._shared(requests, super().loglikelihood)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, after the tokens that precede every text unless add_special_tokens is False.

        Both sides of a context and its continuation are encoded here, so the prefix cancels.
        """
        own = self.text.tokenizer.encode(string)
        return own if add_special_tokens is False else [*self.text.prefix, *own]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        passages = [Passage((*context, *rest), len(rest)) for _, context, rest in requests]
        scores = self.text.scores(passages, self._progress(SCORING))
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows that predict every token once."""
        return self._shared(requests, self._rolled)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt."""
        return self._shared(requests, self._answers)

    def _shared(self, requests: Sequence[Any], answer: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """The answers to all requests; one rank answers those about a context, because they share passes."""
        if self.ranks is None:
            return answer(list(requests))
        contexts: dict[str, int] = {}
        numbers = [contexts.setdefault(request.args[0], len(contexts)) for request in requests]
        mine = [i for i, number in enumerate(numbers) if number % self.ranks.world == self.ranks.rank]
        before = self.cut_prompts
        own = dict(zip(mine, answer([requests[index] for index in mine]), strict=True))
        found: dict[int, Any] = {}
        for part, cut in self.ranks.gathered((own, self.cut_prompts - before)):
            found |= part
            before += cut
        self.cut_prompts = before
        return [found[index] for index in range(len(requests))]

    def _rolled(self, requests: Sequence[Any]) -> list[float]:
        passages: list[Passage] = []
        counts: list[int] = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.text.max_seq_len,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            passages += [Passage((*context, *rest), len(rest)) for context, rest in pairs]
            counts.append(len(pairs))
        scores = iter(self.text.scores(passages, self._progress(ROLLING)))
        return [sum(next(scores).log_likelihood for _ in range(count)) for count in counts]

    def _answers(self, requests: Sequence[Any]) -> list[str]:
        groups: dict[tuple[int, Sampling], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(_how(request.args[1]), []).append(index)
        found: dict[int, str] = {}
        for (num_tokens, sampling), indexes in groups.items():
            texts = [requests[index].args[0] for index in indexes]
            stops = [_stops(requests[index].args[1]) for index in indexes]
            answers, truncated = self.text.continued(
                texts, num_tokens, stops, sampling, self._progress(ANSWERING, len(found), len(requests))
            )
            self.cut_prompts += truncated
            found |= dict(zip(indexes, answers, strict=True))
        return [found[index] for index in range(len(requests))]

    def _progress(self, what: str, before: int = 0, total: int | None = None) -> Callable[[int, int], None]:
        def show(done: int, count: int) -> None:
            if self.report is not None:
                self.report(what, before + done, total or count)

        return show


def _how(settings: dict[str, Any]) -> tuple[int, Sampling]:
    """The number of new tokens, and how they are chosen. Raises ValueError for unsupported settings."""
    known = ("until", *_SAMPLING, *_LENGTHS)
    if unknown := [name for name in settings if name not in known]:
        raise ValueError(
            f"generation_kwargs: must be among {', '.join(known)}, got {unknown[0]}. Change the task's file."
        )
    num_tokens = next((settings[name] for name in _LENGTHS if name in settings), 256)
    if not settings.get("do_sample"):
        return num_tokens, Sampling()
    temperature = settings.get("temperature", 1.0)
    top_k, top_p = settings.get("top_k"), settings.get("top_p")
    return num_tokens, Sampling(temperature=temperature, top_k=top_k, top_p=top_p)


def _stops(settings: dict[str, Any]) -> list[str]:
    given = settings.get("until") or []
    return [given] if isinstance(given, str) else list(given)
