"""`outrider verify answer.json`: asks a gateway whether an answer is what its receipt says."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from outrider.gateway.settings.tree import KEY_VARIABLE
from outrider.gateway.tools.commands.chat_command import DEFAULT_URL
from outrider.gateway.tools.commands.command_parts import reports_user_errors
from outrider.gateway.tools.commands.database_cli import AsJson
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.commands.user_errors import EXIT_FAILED, ChatError
from outrider.gateway.tools.commands.verify.answer_file import read_answer_file, read_document

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_HELP: Final = """
Check an answer against its receipt, by one pass of a model; exit status 1 if they differ.

The answer is a whole one, or the events of a stream as they came. A running gateway judges it.

[bold]Examples[/bold]

  outrider verify answer.json

  outrider verify answer.json --request request.json  [dim]# it had a schema or tools[/dim]

  outrider verify answer.json --model small --temperature 1  [dim]# what else may it be[/dim]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWays:
    """Other ways in which the answer may have been written."""

    model: Annotated[
        list[str] | None, typer.Option(help="Another model that may have written it; repeatable.")
    ] = None
    seed: Annotated[list[int] | None, typer.Option(help="Another seed; repeatable.")] = None
    temperature: Annotated[
        list[float] | None, typer.Option(help="Another temperature; repeatable.")
    ] = None
    top_p: Annotated[list[float] | None, typer.Option(help="Another top-p; repeatable.")] = None
    cascade: Annotated[
        list[float] | None,
        typer.Option(help="A speculative cascade of this alpha (rule opt); repeatable."),
    ] = None

    def hypotheses(self) -> list[dict[str, Any]]:
        """Return one for each value."""
        named = {"seed": self.seed, "temperature": self.temperature, "top_p": self.top_p}
        found = [{name: value} for name, values in named.items() for value in values or ()]
        return [*found, *({"quality": {"cascade": alpha}} for alpha in self.cascade or ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The gateway that judges."""

    url: Annotated[
        str, typer.Option(envvar="OUTRIDER_URL", help="URL of the gateway that judges.")
    ] = DEFAULT_URL
    key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, help="API key, if the gateway requires one."),
    ] = None

    async def reports(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the reports. Raises ChatError."""
        import aiohttp

        from outrider.gateway.tools.commands.session import HTTP_ERRORS, open_session

        url = self.url.rstrip("/").removesuffix("/v1")
        found = []
        try:
            timeout = aiohttp.ClientTimeout(connect=30.0)  # a judgement may take any time
            async with open_session(url, timeout=timeout, key=self.key) as session:
                for body in bodies:
                    async with session.post(
                        f"{url}/v1/verify", json=body, allow_redirects=False
                    ) as response:
                        found.append(_report(response.status, await response.text()))
        except HTTP_ERRORS as error:
            raise ChatError(
                f"no gateway answers at {url} ({error}); start one with `outrider serve`"
            ) from None
        return found


@app.command("verify", help=_HELP)
@reports_user_errors
@takes_flags
def verify(
    *,
    answer: Annotated[Path, typer.Argument(help="A file with the answer.")],
    request: Annotated[
        Path | None, typer.Option(help="A file with its request's JSON, where that is needed.")
    ] = None,
    index: Annotated[
        int | None, typer.Option(min=0, help="Which choice; all of them by default.")
    ] = None,
    others: OtherWays,
    judge: Judge,
    as_json: AsJson = False,
) -> None:
    """Verify an answer; the help is `_HELP`."""
    document = read_answer_file(answer)
    body: dict[str, Any] = {"answer": document, "hypotheses": others.hypotheses()}
    if request is not None:
        body["request"] = read_document(request)
    indices = _indices(document) if index is None else [index]
    bodies = [
        {**body, "index": one, **({} if name is None else {"model": name})}
        for one in indices
        for name in (None, *(others.model or ()))
    ]
    reports = asyncio.run(judge.reports(bodies))
    if as_json:
        typer.echo(json.dumps(reports, indent=2, ensure_ascii=False))
    else:
        for asked, report in zip(bodies, reports, strict=True):
            typer.echo("\n".join(_lines(asked, report)))
    claimed = [r["matches"] for b, r in zip(bodies, reports, strict=True) if "model" not in b]
    if not all(claimed):
        raise typer.Exit(EXIT_FAILED)


def _indices(document: dict[str, Any]) -> list[int]:
    """Return the choices of an answer; a response's or a message's is the only one."""
    choices = document.get("choices")
    found = (
        [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []
    )
    return [each.get("index", 0) for each in found] or [0]


def _report(status: int, text: str) -> dict[str, Any]:
    """Return a report. Raises ChatError for a refusal."""
    try:
        document = json.loads(text)
        if status == 200:
            return dict(document)
        message = document["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the server answered with status {status}, and it is no gateway of Outrider"
    raise ChatError(str(message))


def _lines(asked: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """Say what was found of one choice."""
    verdict = "matches" if report["matches"] else "differs"
    receipt = report["receipt"]
    signed = "no receipt" if receipt is None else f"receipt {receipt['id']}, its signature is valid"
    lines = [
        f"choice {asked['index']}, judged by {report['model']}: {verdict}; {signed}",
        f"  best explanation: {report['explanation']}",
    ]
    said = {
        "prompt_matches": "the prompt is not the one that was signed",
        "answer_matches": "the answer is not the one that was signed",
        "numerics_match": "judged by other arithmetic than the answer's",
    }
    lines += [f"  {text}" for name, text in said.items() if receipt and receipt[name] is False]
    lines += [
        f"  {found['name']}: {found['num_matching']} of {report['num_tokens']} tokens"
        f"{_difference(found['first_difference'])}"
        for found in report["hypotheses"]
    ]
    return [*lines, *(f"  {note}" for note in report["notes"])]


def _difference(first: dict[str, Any] | None) -> str:
    if first is None:
        return ""
    return (
        f"; first difference at {first['index']}: {first['token']!r} for {first['chosen']!r}, "
        f"{first['gap']:.3g} apart"
    )
