"""Records how the scheduler of a real vLLM treats each request, and asks the request again alone.

A request's *stay* begins when it gets blocks, and ends when it is done, aborted or preempted. A
stay is asked again with all that determines its numbers: its tokens, the blocks of other stays that
it found in the cache, which of these had exact copies, and where its prompt was cut into chunks.
Its answer is forced, token by token. So it reads the same as in traffic, and differences can only
come from the order of sums, or from bugs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import sub
from random import Random
from typing import Any

import torch

Likeliest = tuple[torch.Tensor, torch.Tensor]  # tokens [N] and their log probabilities [N]


def sampling(tokens: int, **others: Any) -> Any:
    """Any tokens, so many."""
    from vllm import SamplingParams

    fixed = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=tokens, **fixed | others)


@dataclass(eq=False)
class Stay:
    """One stay of a request in the engine."""

    request: Any  # vLLM's own
    cached: int  # tokens that were in the cache
    given: int  # tokens that it began with: the prompt, and earlier tokens of the answer
    shared: list[tuple["Stay", int]] = field(default_factory=list)  # whose blocks it found
    met: int = 0  # tokens that it found, and that the same step stored
    # For the start of each chunk, which of the pages before it had exact copies.
    copied: dict[int, torch.Tensor] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)  # where its chunks end
    tokens: list[int] = field(default_factory=list)  # all its tokens at the end
    unknown: str = ""  # why its state cannot be restored

    @property
    def stored(self) -> int:
        """So many of the tokens that it began with were stored."""
        return min(self.ends[-1], self.given)


class Watch:
    """Watches the scheduler of a vLLM in this process."""

    def __init__(self, llm: Any):
        self.engine = llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler, worker = core.scheduler, core.model_executor.driver_worker.worker
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.size: int = self.scheduler.block_size
        groups = (each for groups in worker.model_runner.attn_groups for each in groups)
        builders = [builder for group in groups for builder in group.metadata_builders]
        self.builders = [builder for builder in builders if hasattr(builder, "planner")]
        self.stays: list[Stay] = []
        self.alone: Alone | None = None
        self._open: dict[str, Stay] = {}
        self._written: dict[int, tuple[Stay, int, int]] = {}  # and from which token on
        self._stored: set[int] = set()  # blocks of this step
        self._planned: list[tuple[Stay, int, list[int]]] = []
        self._replace(self.scheduler, "schedule", self._schedule)
        self._replace(self.manager, "get_computed_blocks", self._find_blocks)
        self._replace(worker.model_runner.get_model(), "compute_logits", self._compute_logits)
        for builder in self.builders[:1]:
            self._replace(builder, "build", self._build)

    def _replace(self, owner: Any, name: str, mine: Any) -> None:
        own = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: mine(own, *given, **named))

    def begin(self) -> None:
        """Drop all cached blocks and copies."""
        steps = 0  # of tokens that were scheduled before the last answer was known
        while not self.engine.reset_prefix_cache():
            self.engine.step()
            steps += 1
            if steps > 500:
                raise RuntimeError("vLLM does not give its cache back")
        for builder in self.builders[:1]:
            self.forget(torch.arange(len(builder.planner.slot_of)))
        self.stays, self._open, self._written = [], {}, {}

    @torch.inference_mode()  # as a worker makes these tensors
    def copies(self, blocks: list[int], start: int) -> torch.Tensor:
        """Which pages of these blocks have exact copies, of those in the windows before a chunk
        that begins at `start`, without waiting for a GPU."""
        slot_of, pages = self.builders[0].planner.slot_of, self._windows(blocks, start)
        if slot_of.is_cuda:
            pages = pages.pin_memory()
        return slot_of[pages.to(slot_of.device, non_blocking=True)] > 0

    def _windows(self, blocks: list[int], start: int) -> torch.Tensor:
        """The pages in the windows before a chunk."""
        builder, planner = self.builders[0], self.builders[0].planner
        number = torch.arange(-(-start // planner.tokens))
        first, last = number * planner.tokens, (number + 1) * planner.tokens
        number = number[(first < planner.sink) | (last > start - planner.recent)]
        return (
            torch.tensor(blocks)[number // builder.pages] * builder.pages + number % builder.pages
        )

    @torch.inference_mode()  # as a worker makes these tensors
    def forget(self, pages: torch.Tensor) -> None:
        """Drop the copies of these pages."""
        for builder in self.builders:
            builder.planner.forget(pages.to(builder.planner.slot_of.device))

    @torch.inference_mode()  # as a worker makes these tensors
    def restore(self, blocks: list[int], start: int, copied: torch.Tensor) -> bool:
        """Drop the copies that did not exist in traffic; returns whether all others exist."""
        here = self.copies(blocks, start)
        self.forget(self._windows(blocks, start)[~copied.cpu()])
        return not bool((copied & ~here).any())

    def _schedule(self, own: Any, *given: Any, **named: Any) -> Any:
        if self.alone:
            self.alone.limit()
        output = own(*given, **named)
        if self.alone:
            self.alone.keep(output)
        else:
            self._note(output)
        return output

    def _note(self, output: Any) -> None:
        """Record the stays that begin, and all blocks that this step writes, before any request
        reads them."""
        self._stored.clear()
        begins = {each.req_id for each in output.scheduled_new_reqs}
        begins |= {*output.scheduled_cached_reqs.resumed_req_ids}
        blocks = {}
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            start = request.num_computed_tokens - count
            blocks[name] = self.manager.get_block_ids(name)[0]
            if name in begins:
                self.close(name, request.num_tokens)
                stay = Stay(request, start, request.num_tokens)
                self._open[name] = stay
                self.stays.append(stay)
            stay = self._open[name]
            stay.ends.append(start + count)
            for number in range(start // self.size, -(-(start + count) // self.size)):
                block = blocks[name][number]
                self._written[block] = stay, number, max(start, number * self.size)
                self._stored.add(block)
        for name in output.num_scheduled_tokens:
            stay = self._open[name]
            if name in begins:
                self._find_shared(stay, blocks[name])
            start = stay.ends[-1] - output.num_scheduled_tokens[name]
            if self.builders and 0 < start < stay.given:
                self._planned.append((stay, start, blocks[name]))

    def close(self, name: str, tokens: int) -> None:
        """Record the end of a stay, if one is open."""
        if stay := self._open.pop(name, None):
            stay.tokens = list(stay.request.all_token_ids)[:tokens]

    def close_all(self) -> None:
        """Record the end of all stays."""
        for name, stay in [*self._open.items()]:
            self.close(name, stay.request.num_tokens)

    def _find_shared(self, stay: Stay, blocks: list[int]) -> None:
        if stay.cached % self.size:
            stay.unknown = "a block is there in part"
        for number, block in enumerate(blocks[: stay.cached // self.size]):
            wrote, at, start = self._written.get(block, (None, 0, 0))
            if wrote is None or at != number or wrote.ends[-1] < (number + 1) * self.size:
                stay.unknown = "it found a block that nobody wrote"
                return
            stay.unknown = stay.unknown or wrote.unknown
            stay.shared.append((wrote, at))
            if block in self._stored:
                stay.met += (number + 1) * self.size - start

    def _build(self, own: Any, *given: Any, **named: Any) -> Any:
        """Record the copies of a step once it is planned, when its own pages have theirs."""
        metadata = own(*given, **named)
        for stay, start, blocks in self._planned:
            stay.copied[start] = self.copies(blocks, start)
        self._planned.clear()
        return metadata

    def _find_blocks(self, own: Any, request: Any) -> Any:
        result = own(request)
        if self.alone is None:
            return result
        blocks = self.alone.find(request.request_id)
        return type(result[0])((blocks,)), len(blocks) * self.size, *result[2:]

    def _compute_logits(self, own: Any, *given: Any, **named: Any) -> Any:
        logits = own(*given, **named)
        if self.alone and logits is not None:
            self.alone.see(logits)
        return logits


class Alone:
    """Asks the stays of a `Watch` again, one after another; or each next to a stranger, a request
    that shares nothing. It adds a random number of tokens to each chunk, so that kernels for other
    sizes compute it."""

    def __init__(self, watch: Watch, draw: Random | None = None):
        self.watch, self.draw, self.beside = watch, draw, 0
        self._kept: list[Any] = []
        self._stay: Stay | None = None
        self._asked, self._name = 0, ""
        self._found: list[Any] = []
        self._blocks: dict[Stay, list[Any]] = {}
        self._places: Iterator[int] = iter(())
        self._wanted: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    def ask(self, stay: Stay, wanted: torch.Tensor | None) -> torch.Tensor | None:
        """The log probabilities `[R, N]` of the N wanted tokens as the first one of the answer.
        With a stranger, there are R rows, of which one is the stay's.

        A stay is unknown if a copy is missing that existed in traffic.
        """
        answered = len(stay.tokens) - stay.given if stay.stored == stay.given else 0
        ends = [end for end in stay.ends if end < stay.stored]
        # One more token is requested, so that the last token of the answer is stored.
        self._places = iter([*ends, *range(stay.stored, stay.stored + answered + 2)])
        self._wanted, self._seen = wanted, None
        self._found = [self._blocks[wrote][at] for wrote, at in stay.shared]
        self._stay, self._blocks[stay] = stay, []
        self._name = self._add(stay.tokens[: stay.stored], answered + 1)
        stranger = self._draw_stranger([stay.cached, *ends, stay.stored])
        self._finish(self._add(stranger, 1000) if stranger else "")
        return None if self._seen is None else self._seen.cpu()

    def _draw_stranger(self, bounds: list[int]) -> list[int]:
        """The tokens of a stranger next to chunks with these bounds, if there is one."""
        if self.draw is None:
            return []
        config = self.watch.engine.vllm_config
        room = config.scheduler_config.max_num_batched_tokens - max(map(sub, bounds[1:], bounds))
        self.beside = self.draw.randint(1, room)
        count = min(self.beside * len(bounds), config.model_config.max_model_len // 2)
        return self.draw.choices(range(5, config.model_config.get_vocab_size()), k=count)

    def release(self) -> None:
        """Return all blocks."""
        self.watch.pool.free_blocks(self._kept)

    def _add(self, tokens: list[int], answer: int) -> str:
        self._asked += 1
        name, prompt = f"alone {self._asked}", {"prompt_token_ids": tokens}
        added: str = self.watch.engine.add_request(name, prompt, sampling(answer))
        return added

    def _finish(self, stranger: str) -> None:
        """Let the stay answer; then the stranger is aborted."""
        engine = self.watch.engine
        self.watch.alone = self
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    engine.abort_request([stranger], internal=True)
        for _ in range(2):  # of tokens that were scheduled before the last answer was known
            engine.step()
        self.watch.alone = None

    def find(self, name: str) -> list[Any]:
        """The blocks that a request must find."""
        return self._found if name == self._name else []

    def limit(self) -> None:
        """Schedule the stay's next chunk in the next step."""
        scheduler, stay = self.watch.scheduler, self._stay
        request = scheduler.requests.get(self._name)
        config = scheduler.scheduler_config
        config.long_prefill_token_threshold = 0
        if request is None or stay is None:
            return
        done = request.num_computed_tokens or len(self._found) * self.watch.size
        ends = [end for end in stay.ends if done < end <= stay.stored]
        chunk = min([*ends, stay.stored] if done < stay.stored else [done + 1]) - done
        scheduler.max_num_scheduled_tokens = chunk + self.beside
        if self.beside:
            config.long_prefill_token_threshold = chunk

    def keep(self, output: Any) -> None:
        """Give a step the copies that it had in traffic, and keep the blocks of a stay for others
        to find."""
        stay, count = self._stay, output.num_scheduled_tokens.get(self._name)
        if stay is None or not count:
            return
        held = self.watch.manager.get_blocks(self._name).blocks[0]
        start = self.watch.scheduler.requests[self._name].num_computed_tokens - count
        if (copied := stay.copied.get(start)) is not None and not self.watch.restore(
            [block.block_id for block in held], start, copied
        ):
            stay.unknown = "copies are missing"
        blocks = self._blocks[stay]
        new = list(held[len(blocks) :])
        self.watch.pool.touch(new)
        self._kept += new
        blocks += new

    def see(self, logits: torch.Tensor) -> None:
        """Record the wanted log probabilities of these logits, and return the forced next token."""
        place = next(self._places, None)
        stay = self._stay
        if place is None or stay is None:
            return
        if place == stay.given and self._wanted is not None:
            wanted = self._wanted.to(logits.device)
            self._seen = logits.float().log_softmax(-1)[:, wanted]
        if stay.given <= place < len(stay.tokens):
            logits[:, stay.tokens[place]] = 2e4  # whatever the stranger answers
