"""Our engine and the other programs as cases of one run, at the same number of bits a weight.

Every program gets the same prompts, threads and processor cores. One that is not installed is
named, with the option that would bring it in.
"""

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.peers.llama_peer import Llama, LlamaServer, llama_server
from benchmarks.peers.openvino_peer import OpenVinoPeer, openvino_process
from benchmarks.peers.peers import Peer, PeerModels, PeerTask, peer_process
from benchmarks.shared.driving import make_requests
from benchmarks.shared.harness import console
from benchmarks.shared.pair import Folders, Pair
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.record import package_version
from benchmarks.shared.turns import Case, Turn, engine_case
from outrider.engine.model.quantised.formats import SCHEMES, SchemeName
from outrider.engine.request import EngineRequest

OUTRIDER, TRANSFORMERS, OPENVINO, LLAMA = "outrider", "transformers", "openvino", "llama.cpp"

# How the engine holds the target in so many bits; None: as it is.
OUR_SCHEMES: dict[int, SchemeName | None] = {
    16: None,
    **{int(name.removeprefix("int")): name for name in SCHEMES},
}
_OPENVINO_WEIGHTS = {16: "bf16", 8: "int8", 4: "int4"}
_LLAMA_KINDS = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}
_PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

Answer = Callable[[Prompt, int], Turn]
"""Answers a prompt with at most so many tokens."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program at one number of bits: plain decoding, and speculation in one or more settings.

    `weight_bytes`: of the target, as the program holds them.
    """

    name: str
    version: str
    weight_bytes: int
    plain: Answer
    speculative: Mapping[str, Answer]

    @property
    def answers(self) -> dict[str, Answer]:
        """All ways by the names of their cases."""
        ways = {"plain": self.plain, **self.speculative}
        return {f"{self.name} {way}": answer for way, answer in ways.items()}


def cases_of(
    answers: Mapping[str, Answer], prompts: Sequence[Prompt], max_tokens: int
) -> dict[str, Case]:
    """Ways of answering as cases over these prompts."""

    def ask(question: int, answer: Answer) -> Turn:
        return answer(prompts[question], max_tokens)

    return {name: partial(ask, answer=answer) for name, answer in answers.items()}


def our_program(pair: Pair, version: str) -> Program:
    """Plain, and with trees as in serving."""
    bench = pair.bench()

    def answer(prompt: Prompt, max_tokens: int, speculate: bool) -> Turn:
        def request_for(_: int) -> EngineRequest:
            (request,) = make_requests(
                [prompt], tier="large", max_tokens=max_tokens, stop=pair.stop, speculate=speculate
            )
            return request

        return engine_case(bench, request_for)(0)

    return Program(
        name=OUTRIDER,
        version=version,
        weight_bytes=pair.runners["large"].model.weight_bytes,
        plain=partial(answer, speculate=False),
        speculative={"trees": partial(answer, speculate=True)},
    )


@dataclass(frozen=True, kw_only=True)
class Others:
    """Starts the other programs; they end with `stack`. `bits`: 16, 8 or 4."""

    stack: contextlib.ExitStack
    arguments: argparse.Namespace
    folders: Folders
    pair: Pair
    bits: int

    def programs(self) -> tuple[list[Program], dict[str, str]]:
        """Those that are there, and of the others why they are not."""
        makers = {
            TRANSFORMERS: (
                self.bits == 16,
                "only runs uncompressed weights here",
                self.transformers,
            ),
            OPENVINO: (
                self.arguments.openvino_python is not None,
                "not installed; --openvino-python names an interpreter that has it",
                self.openvino,
            ),
            LLAMA: (
                self.arguments.llama is not None,
                "not installed; --llama names an environment that has it",
                self.llama,
            ),
        }
        there = [make() for is_there, _, make in makers.values() if is_there]
        absent = {name: why for name, (is_there, why, _) in makers.items() if not is_there}
        for name, why in absent.items():
            console.print(f"[yellow]absent: {name} ({why})[/yellow]")
        return there, absent

    def transformers(self) -> Program:
        """generate(), plain and with the drafter as its assistant."""
        model = self.pair.runners["large"].model
        models = PeerModels(
            target=self.folders.large,
            assistant=self.folders.small,
            dtype=model.dtype,
            device=self.arguments.device,
            num_threads=self.arguments.threads,
        )
        with console.status("loading the same weights in transformers"):
            peer = self.stack.enter_context(peer_process(models))
        answer = partial(_transformers_answer, peer=peer, stop=self.pair.stop)
        return Program(
            name=TRANSFORMERS,
            version=_package("transformers"),
            weight_bytes=model.num_parameters * model.dtype.itemsize,
            plain=partial(answer, assisted=False),
            speculative={"assisted": partial(answer, assisted=True)},
        )

    def openvino(self) -> Program:
        """ContinuousBatchingPipeline, plain and with several numbers of assistant tokens."""
        dtype = str(self.pair.runners["large"].model.dtype).removeprefix("torch.")
        peer = self.stack.enter_context(
            openvino_process(
                self.arguments.openvino_python,
                target=self.folders.large,
                draft=self.folders.small,
                weights=_OPENVINO_WEIGHTS[self.bits],
                num_threads=self.arguments.threads,
                precision=_PRECISIONS[dtype],
            )
        )
        answer = partial(_openvino_answer, peer=peer, stop=self.pair.stop)
        return Program(
            name=OPENVINO,
            version=" ".join(f"{name} {number}" for name, number in peer.versions.items()),
            weight_bytes=peer.weight_bytes,
            plain=partial(answer, number=0),
            speculative={
                f"{number} tokens": partial(answer, number=number)
                for number in self.arguments.assistant_tokens
            },
        )

    def llama(self) -> Program:
        """llama-server, plain and with several numbers of drafted tokens: a server each."""
        llama = Llama.found_in(self.arguments.llama)
        target = llama.converted(self.folders.large, _LLAMA_KINDS[self.bits])
        draft = llama.converted(self.folders.small, _LLAMA_KINDS[16])

        def started(number: int) -> Answer:
            server = self.stack.enter_context(
                llama_server(
                    llama,
                    target,
                    draft if number else None,
                    num_threads=self.arguments.threads,
                    num_assistant_tokens=number,
                )
            )
            return partial(_llama_answer, server=server)

        return Program(
            name=LLAMA,
            version=llama.version,
            weight_bytes=target.stat().st_size,
            plain=started(0),
            speculative={
                f"{number} tokens": started(number) for number in self.arguments.assistant_tokens
            },
        )


def _transformers_answer(
    prompt: Prompt, max_tokens: int, *, peer: Peer, stop: tuple[int, ...], assisted: bool
) -> Turn:
    return peer.run(PeerTask(prompt=prompt, max_tokens=max_tokens, stop=stop, assisted=assisted))


def _openvino_answer(
    prompt: Prompt, max_tokens: int, *, peer: OpenVinoPeer, stop: tuple[int, ...], number: int
) -> Turn:
    return peer.answer(
        "assisted" if number else "plain",
        prompt.token_ids,
        max_tokens=max_tokens,
        stop=stop,
        num_assistant_tokens=number,
    )


def _llama_answer(prompt: Prompt, max_tokens: int, *, server: LlamaServer) -> Turn:
    return server.answer(prompt.token_ids, max_tokens=max_tokens)


def _package(name: str) -> str:
    return f"{name} {package_version(name)}"


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add options that say which other programs run, and how."""
    parser.add_argument(
        "--bits", type=int, choices=sorted(OUR_SCHEMES), default=16, help="of a weight"
    )
    parser.add_argument("--openvino-python", type=Path, help="interpreter that has openvino-genai")
    parser.add_argument("--llama", type=Path, help="environment that has llama-server and gguf")
    parser.add_argument("--assistant-tokens", type=int, nargs="+", default=[4, 8])
