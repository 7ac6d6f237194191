"""A prompt or a conversation on the terminal -> answers streamed as they are decoded."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from transformers import GenerationConfig

from infer.acceptance_stats import AcceptanceStats
from infer.generate import Generator
from infer.loading import Dtype, check_heads_options, load_generator
from infer.prompts import encode_chat
from infer.static.sampling import LEAST_TEMPERATURE
from infer.verifiers import VerifierChoice, check_verifier, is_lossless
from medusa_heads.arguments import OPTIONAL
from medusa_heads.quantization import Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen; the same law with and without heads."""

    temperature: float = 0.0
    """0 takes the most likely token; above 0 tokens are drawn, from the base model's exact law."""
    top_k: int = 0
    """Draw among the K most likely tokens; 0 is all."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability; 1 is all."""
    min_p: float = 0.0
    """Draw among tokens at least this likely, as a share of the most likely one; 0 is all."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the text so far less likely; 1 is off."""
    seed: int = 0
    """Fixes what is drawn."""
    verifier: VerifierChoice = "auto"
    """How drafts are verified when tokens are drawn; the law is the base model's own with all but `typical`, which
    accepts whatever is likely enough. All but auto, sample-and-match and typical draw their drafts: token-rejection and
    block over --tree chain; recursive-rejection and traversal over chain, static:N, FILE.json, or auto with measured heads."""

    def generation_config(self) -> GenerationConfig | None:
        """None for plain greedy decoding. Raises ValueError naming an impossible option."""
        for name, value, possible, range_ in (
            ("--temperature", t := self.temperature, not t or t >= LEAST_TEMPERATURE, f"0 (greedy), or {LEAST_TEMPERATURE:g} and more"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 or more"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("--min-p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
            ("--repetition-penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"),
        ):
            if not possible:
                raise ValueError(f"{name} {value}: must be {range_}")
        check_verifier(self.verifier, greedy=not self.temperature)
        if not self.temperature:
            for name, value, neutral in (("--top-k", self.top_k, 0), ("--top-p", self.top_p, 1), ("--min-p", self.min_p, 0)):
                if value != neutral:
                    raise ValueError(f"{name} {value} has no effect at --temperature 0: set a temperature, or leave it out")
            if self.repetition_penalty == 1:
                return None
            return GenerationConfig(do_sample=False, repetition_penalty=self.repetition_penalty)
        return GenerationConfig(
            do_sample=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    def warn(self) -> None:
        """Says on standard error that the text will not have the base model's law, where it will not."""
        if not is_lossless(self.verifier):
            print(f"warning: --verifier {self.verifier} is lossy: the text does not follow the base model's own law", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions(SamplingOptions):
    """What is talked to, and how."""

    system: str | None = None
    """A system message at the beginning."""
    base: str = "embedded"
    """Base model: `embedded`, a local folder or a hub id."""
    base_quantization: Quantization = "none"
    """Packs the base's weights into 8bit or 4bit (nf4), by bitsandbytes; heads serve the form that they were trained on."""
    revision: str | None = None
    """Revision of the base model on the hub."""
    heads: str | None = None
    """Heads: `pretrained`, `pretrained:NAME`, a folder, or `none` for plain decoding. Default: `pretrained` with the embedded base."""
    max_new_tokens: int = 512
    """Longest answer in tokens."""
    stop: Annotated[tuple[str, ...], OPTIONAL] = ()
    """Strings that end an answer; they are not printed."""
    tree: str = "auto"
    """auto, tuned, chain, beam:N, static:N or FILE.json; N nodes besides the root. auto measures this machine,
    tuned is what `medusa-heads tree` stored with the heads."""
    dtype: Dtype | None = None
    """Number type of the base model and the heads; by default the base checkpoint's own."""
    device: str = "auto"
    """auto (CUDA where there is a device), cpu, cuda or cuda:N."""

    def load(self) -> tuple[Generator, Any]:
        """The generator and the tokenizer. Impossible options are refused before anything is loaded."""
        self.generation_config()
        check_heads_options(self.heads, tree=self.tree, verifier=self.verifier, temperature=self.temperature)
        self.warn()
        return load_generator(
            self.base,
            self.heads,
            tree=self.tree,
            dtype=self.dtype,
            device=self.device,
            quantization=self.base_quantization,
            revision=self.revision,
        )

    def settings(self) -> dict[str, Any]:
        """Of every answer."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "stop": self.stop,
            "generation_config": self.generation_config(),
            "seed": self.seed,
            "verifier": self.verifier,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(ConversationOptions):
    """Answer one prompt, streamed as it comes; the text follows the base model's own law, greedy by default."""

    prompt: str
    """The user's message, or `-` to read it from standard input."""
    show_stats: bool = False
    """Print speed and acceptance to standard error at the end."""

    def run(self) -> None:
        prompt = sys.stdin.read() if self.prompt == "-" else self.prompt
        if not prompt.strip():
            raise ValueError("--prompt is empty: write a message, or `-` and pass it on standard input")
        generator, tokenizer = self.load()
        ids = encode_chat(tokenizer, [*system_message(self.system), {"role": "user", "content": prompt}])
        answer = stream(generator, ids, **self.settings())
        if self.show_stats:
            print(answer.summary(), file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(ConversationOptions):
    """Talk to the model, turn by turn: /reset forgets the conversation, /quit (or end of input) ends it."""

    def run(self) -> None:
        generator, tokenizer = self.load()
        messages = system_message(self.system)
        # What no message can mend is told before the first one.
        generator.prepare([encode_chat(tokenizer, [*messages, {"role": "user", "content": "Hello"}])], **self.settings())
        if sys.stdin.isatty():
            print("/reset forgets the conversation, /quit ends it.", file=sys.stderr)
        while (line := read_line()) is not None and line.strip() != "/quit":
            if line.strip() == "/reset":
                messages = system_message(self.system)
                print("(conversation forgotten)", file=sys.stderr)
            elif line.strip():
                messages = self._turn(generator, tokenizer, messages, line)

    def _turn(self, generator: Generator, tokenizer: Any, messages: list[dict[str, str]], line: str) -> list[dict[str, str]]:
        """Answers one message. Returns the conversation so far, unchanged where the message does not fit."""
        asked = [*messages, {"role": "user", "content": line}]
        try:
            answer = stream(generator, encode_chat(tokenizer, asked), **self.settings())
        except ValueError as error:
            print(f"error: {error} (/reset begins a new conversation)", file=sys.stderr)
            return messages
        print(answer.summary(), file=sys.stderr)
        return [*asked, {"role": "assistant", "content": answer.text}]


def system_message(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def read_line() -> str | None:
    """The next line of standard input, or None at its end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A finished answer. seconds: wall time after the first token; finish_reason: `interrupted` after Ctrl-C."""

    text: str
    num_tokens: int
    first_token_s: float
    seconds: float
    finish_reason: str
    stats: AcceptanceStats

    def summary(self) -> str:
        """One line on speed and acceptance."""
        parts = [f"{self.num_tokens} tokens", f"first after {self.first_token_s:.2f} s"]
        if self.num_tokens > 1:
            parts.append(f"{(self.num_tokens - 1) / self.seconds:.1f} tokens/s")
        if (tau := self.stats.mean_acceptance_length) is not None:
            parts.append(f"{tau:.2f} tokens per forward")
        return f"[{', '.join(parts)}; ended by {self.finish_reason}]"


def stream(
    generator: Generator,
    ids: list[int],
    *,
    max_new_tokens: int,
    stop: Sequence[str],
    generation_config: GenerationConfig | None = None,
    seed: int = 0,
    verifier: VerifierChoice = "auto",
) -> StreamedAnswer:
    """Decodes one prompt, printing text as soon as no later token can change it. Ctrl-C ends the answer."""
    stats = [AcceptanceStats()]
    printed, num_tokens, reason = "", 0, "interrupted"
    start = time.perf_counter()
    first = start
    try:
        for step in generator.steps(
            [ids],
            max_new_tokens=max_new_tokens,
            stop=stop,
            generation_config=generation_config,
            seed=seed,
            verifier=verifier,
            stats=stats,
        ):
            row = step.rows[0]
            first = first if num_tokens else time.perf_counter()
            num_tokens = len(row.token_ids)
            stable = row.stable_text()
            print(stable[len(printed) :], end="", flush=True)
            printed, reason = stable, row.finish_reason or reason
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return StreamedAnswer(printed, num_tokens, first - start, time.perf_counter() - first, reason, stats[0])
